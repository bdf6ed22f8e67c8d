#include "stream/experts.h"

#include "base/pages.h"
#include "llmaas/io.h"
#include "src/clock.h"
#include "src/grow.h"

#include <stdlib.h>
#include <sys/mman.h>

#define PAGE 4096u

enum {
    READ_BYTES = 1 << 20,
    DEPTH      = 16,
    AGE        = 32, /* graphs after which use counts are halved */
    GROUP      = 3, /* products that usually share one choice of experts: gate, up and down */
};

/* Memory for one expert. */
typedef struct slot {
    llmaas_stack *   owner; /* NULL: free */
    int32_t          expert;
    uint64_t         turn; /* when it was last used, or will be next */
    llmaas_io_read * reads;
    size_t           n_reads, n_capacity;
} slot;

/* The slots of one size. */
typedef struct size_class {
    struct size_class * next;
    size_t              n_bytes; /* bytes of a slot */
    size_t              n_all;   /* experts of that size */
    size_t              n_least; /* most experts of one weight */
    size_t              n_slots; /* slots that may be used, at most n_all */
    size_t              n_touched;
    char *              base; /* NULL until the first graph */
    slot *              slots;
} size_class;

struct llmaas_stack {
    llmaas_stack * next;
    size_class *   size;
    int            fd;
    uint64_t       offset;
    int32_t        n_experts;
    struct {
        int32_t  slot;   /* negative: none */
        uint32_t n_uses; /* uses of late */
    } experts[];
};

/* A product of the graph. */
typedef struct use {
    llmaas_stack *             stack;
    const struct ggml_tensor * ids;
} use;

struct llmaas_experts {
    llmaas_io *    io;
    uint32_t       n_read_most; /* largest read in bytes */
    llmaas_graph * graph;
    size_class *   sizes;
    llmaas_stack * stacks;
    use *          uses;
    size_t         n_uses, uses_capacity;
    uint64_t       n_turns, n_graphs;

    llmaas_expert_stats stats;
};

/* -- creation and destruction ------------------------------------------------------------------------------------ */

llmaas_experts * llmaas_experts_new(const llmaas_reading * reading) {
    llmaas_experts * experts = calloc(1, sizeof *experts);
    if (experts && !llmaas_experts_set_reading(experts, reading)) {
        free(experts);
        return NULL;
    }
    return experts;
}

bool llmaas_experts_set_reading(llmaas_experts * experts, const llmaas_reading * reading) {
    llmaas_io * io;
    if (llmaas_io_open(LLMAAS_IO_BEST, reading->depth ? reading->depth : DEPTH, &io) != LLMAAS_OK) {
        return false;
    }
    llmaas_io_close(experts->io);
    experts->io          = io;
    experts->n_read_most = reading->n_bytes ? reading->n_bytes : READ_BYTES;
    return true;
}

static void free_slots(size_class * size) {
    for (size_t i = 0; size->slots && i < size->n_all; i++) {
        free(size->slots[i].reads);
    }
    free(size->slots);
    if (size->base) {
        munmap(size->base, size->n_all * size->n_bytes);
    }
}

void llmaas_experts_free(llmaas_experts * experts) {
    if (!experts) {
        return;
    }
    llmaas_io_close(experts->io);
    for (size_class * size = experts->sizes; size;) {
        size_class * next = size->next;
        free_slots(size);
        free(size);
        size = next;
    }
    for (llmaas_stack * stack = experts->stacks; stack;) {
        llmaas_stack * next = stack->next;
        free(stack);
        stack = next;
    }
    free(experts->uses);
    free(experts);
}

static size_class * class_of(llmaas_experts * experts, size_t n_bytes) {
    for (size_class * size = experts->sizes; size; size = size->next) {
        if (size->n_bytes == n_bytes) {
            return size;
        }
    }
    size_class * made = calloc(1, sizeof *made);
    if (made) {
        made->n_bytes  = n_bytes;
        made->next     = experts->sizes;
        experts->sizes = made;
    }
    return made;
}

llmaas_stack * llmaas_experts_add(llmaas_experts * experts, int fd, uint64_t offset, size_t n_bytes, int32_t n_experts) {
    if (n_bytes % PAGE != 0 || offset % PAGE != 0) {
        return NULL;
    }
    size_class *   size  = class_of(experts, n_bytes);
    llmaas_stack * stack = size ? calloc(1, sizeof *stack + (size_t) n_experts * sizeof *stack->experts) : NULL;
    if (!stack) {
        return NULL;
    }
    *stack = (llmaas_stack) {
        .next = experts->stacks, .size = size, .fd = fd, .offset = offset, .n_experts = n_experts};
    for (int32_t i = 0; i < n_experts; i++) {
        stack->experts[i].slot = -1;
    }
    experts->stacks = stack;
    size->n_all += (size_t) n_experts;
    size->n_least = (size_t) n_experts > size->n_least ? (size_t) n_experts : size->n_least;
    size->n_slots = size->n_least;
    experts->stats.n_bytes += (uint64_t) n_experts * n_bytes;
    return stack;
}

/* -- memory ------------------------------------------------------------------------------------------------------ */

static bool make_slots(size_class * size) {
    size->base    = llmaas_pages_reserve(size->n_all * size->n_bytes);
    size->slots   = calloc(size->n_all, sizeof *size->slots);
    if (size->base && size->slots) {
        return true;
    }
    free_slots(size);
    size->base  = NULL;
    size->slots = NULL;
    return false;
}

static void disown(slot * s) {
    if (s->owner) {
        s->owner->experts[s->expert].slot = -1;
        s->owner = NULL;
    }
}

/* Allow n slots; those beyond give their memory back. */
static void resize(size_class * size, size_t n) {
    for (size_t i = n; i < size->n_touched; i++) {
        disown(&size->slots[i]);
    }
    if (n < size->n_touched) {
        llmaas_pages_release(llmaas_pages_in(size->base + n * size->n_bytes, (size->n_touched - n) * size->n_bytes));
        size->n_touched = n;
    }
    size->n_slots = n;
}

/* Give each size memory for the same share of its experts, but no less than a product may need. */
void llmaas_experts_set_memory(llmaas_experts * experts, uint64_t n_bytes) {
    const double share = (double) n_bytes / (double) experts->stats.n_bytes;
    for (size_class * size = experts->sizes; size; size = size->next) {
        const double n = share < 1 ? share * (double) size->n_all : (double) size->n_all;
        resize(size, (size_t) n > size->n_least ? (size_t) n : size->n_least);
    }
}

llmaas_expert_stats llmaas_experts_read_stats(const llmaas_experts * experts) {
    llmaas_expert_stats stats = experts->stats;
    for (const size_class * size = experts->sizes; size; size = size->next) {
        stats.n_least += size->n_least * size->n_bytes;
        stats.n_kept += size->n_touched * size->n_bytes;
    }
    return stats;
}

/* -- reading ----------------------------------------------------------------------------------------------------- */

static uint32_t uses_of(const slot * s) { return s->owner->experts[s->expert].n_uses; }

/* Find a slot to reuse, among those not needed from `turn` on: the one whose expert was used least often of late.
 * Among equal ones, take the most recently used: if there are fewer slots than a token has uses, the older ones then stay
 * until they are used again. NULL if all slots are needed. */
static slot * free_slot(size_class * size, uint64_t turn) {
    if (size->n_touched < size->n_slots) {
        return &size->slots[size->n_touched++];
    }
    slot * found = NULL;
    for (size_t i = 0; i < size->n_slots; i++) {
        slot * s = &size->slots[i];
        if (!s->owner) {
            return s;
        }
        if (s->turn < turn && (!found || uses_of(s) < uses_of(found) ||
                               (uses_of(s) == uses_of(found) && s->turn > found->turn))) {
            found = s;
        }
    }
    return found;
}

/* Make room for the reads of an expert, none of which is in flight. False if out of memory. */
static bool size_reads(const llmaas_experts * experts, const size_class * size, slot * s) {
    const size_t n = (size->n_bytes + experts->n_read_most - 1) / experts->n_read_most;
    if (n > s->n_capacity) {
        llmaas_io_read * reads = realloc(s->reads, n * sizeof *reads);
        if (!reads) {
            return false;
        }
        s->reads      = reads;
        s->n_capacity = n;
    }
    s->n_reads = n;
    return true;
}

static void start_reads(llmaas_experts * experts, const llmaas_stack * stack, slot * s) {
    const size_class * size  = stack->size;
    const uint64_t     begin = stack->offset + (uint64_t) s->expert * size->n_bytes;
    char *             to    = size->base + (size_t) (s - size->slots) * size->n_bytes;
    for (size_t i = 0; i < s->n_reads; i++) {
        const size_t   from = i * experts->n_read_most, left = size->n_bytes - from;
        const uint32_t n    = (uint32_t) (left < experts->n_read_most ? left : experts->n_read_most);
        if (llmaas_io_room(experts->io) == 0) {
            llmaas_io_drain(experts->io);
        }
        s->reads[i] = (llmaas_io_read) {
            .fd = stack->fd, .offset = begin + from, .n_bytes = n, .n_needed = n, .buffer = to + from};
        llmaas_io_start(experts->io, &s->reads[i]);
        experts->stats.n_read += n;
    }
}

/* Keep an expert until `turn`, if it is in a slot. Return whether it is. */
static bool stays(llmaas_experts * experts, llmaas_stack * stack, int32_t expert, uint64_t turn) {
    const int32_t at = stack->experts[expert].slot;
    slot *        s  = at >= 0 ? &stack->size->slots[at] : NULL;
    if (s && s->turn < turn) {
        s->turn = turn;
        stack->experts[expert].n_uses++;
        experts->stats.n_hits++;
    }
    return s != NULL;
}

/* Start reading an expert into a slot that is not needed from `now` on. False if there is none. */
static bool fetch(llmaas_experts * experts, llmaas_stack * stack, int32_t expert, uint64_t turn, uint64_t now) {
    slot * s = free_slot(stack->size, now);
    if (!s || !size_reads(experts, stack->size, s)) {
        return false;
    }
    disown(s);
    s->owner  = stack;
    s->expert = expert;
    s->turn   = turn;
    stack->experts[expert].slot = (int32_t) (s - stack->size->slots);
    stack->experts[expert].n_uses++;
    experts->stats.n_misses++;
    start_reads(experts, stack, s);
    return true;
}

static bool await(llmaas_experts * experts, const llmaas_stack * stack, int32_t expert) {
    slot * s  = &stack->size->slots[stack->experts[expert].slot];
    bool   ok = true;
    for (size_t i = 0; i < s->n_reads; i++) {
        if (!s->reads[i].is_done) {
            llmaas_io_wait(experts->io, &s->reads[i]);
        }
        ok = ok && s->reads[i].error == 0;
    }
    return ok;
}

/* -- computing a graph ------------------------------------------------------------------------------------------- */

/* Halve all use counts, so that old uses count less and less. */
static void age(llmaas_experts * experts) {
    for (llmaas_stack * stack = experts->stacks; stack; stack = stack->next) {
        for (int32_t i = 0; i < stack->n_experts; i++) {
            stack->experts[i].n_uses /= 2;
        }
    }
}

void llmaas_experts_begin(llmaas_experts * experts, llmaas_graph * graph) {
    experts->graph  = graph;
    experts->n_uses = 0;
    if (++experts->n_graphs % AGE == 0) {
        age(experts);
    }
}

/* Argument of the step before a product. The step reads the chosen experts, and those of later products with the same
 * choice. */
struct choice {
    llmaas_experts *           experts;
    size_t                     index; /* of the product's use */
    uint64_t                   turn;
    const struct ggml_tensor * ids;
    int32_t *                  slots; /* slot numbers in place of the ids, contiguous */
};

static int32_t id_at(const struct ggml_tensor * ids, int64_t i) {
    const char * row = (const char *) ids->data + (size_t) (i / ids->ne[0]) * ids->nb[1];
    return *(const int32_t *) (const void *) (row + (size_t) (i % ids->ne[0]) * ids->nb[0]);
}

/* First mark the experts already in slots, so that no other expert takes those slots. */
static bool fetch_all(const struct choice * c, llmaas_stack * stack, uint64_t turn) {
    const int64_t n = ggml_nelements(c->ids);
    for (int64_t i = 0; i < n; i++) {
        const int32_t expert = id_at(c->ids, i);
        if (expert < 0 || expert >= stack->n_experts) {
            return false;
        }
        stays(c->experts, stack, expert, turn);
    }
    for (int64_t i = 0; i < n; i++) {
        const int32_t expert = id_at(c->ids, i);
        if (!stays(c->experts, stack, expert, turn) && !fetch(c->experts, stack, expert, turn, c->turn)) {
            return false;
        }
    }
    llmaas_io_poll(c->experts->io);
    return true;
}

static void fetch_later(const struct choice * c) {
    const llmaas_experts * experts = c->experts;
    for (size_t i = c->index + 1; i < experts->n_uses && experts->uses[i].ids == experts->uses[c->index].ids; i++) {
        llmaas_stack * stack = experts->uses[i].stack;
        if (stack->size->n_slots >= GROUP * stack->size->n_least) {
            fetch_all(c, stack, c->turn + (i - c->index));
        }
    }
}

static void choose(void * arg, int ith, int nth) {
    const struct choice * c       = arg;
    llmaas_experts *      experts = c->experts;
    llmaas_stack *        stack   = experts->uses[c->index].stack;
    (void) nth;
    if (ith != 0) {
        return;
    }
    const uint64_t started = llmaas_now_ns();
    bool           ok      = fetch_all(c, stack, c->turn);
    if (ok) {
        fetch_later(c);
    }
    for (int64_t i = 0; i < ggml_nelements(c->ids); i++) {
        const int32_t expert = id_at(c->ids, i);
        ok          = ok && await(experts, stack, expert);
        c->slots[i] = ok ? stack->experts[expert].slot : 0;
    }
    if (!ok) {
        llmaas_graph_fail(experts->graph);
    }
    experts->stats.stalled_ns += llmaas_now_ns() - started;
}

static bool note_use(llmaas_experts * experts, llmaas_stack * stack, const struct ggml_tensor * ids) {
    use * uses = llmaas_grown(experts->uses, experts->n_uses, &experts->uses_capacity, sizeof *uses);
    if (uses) {
        experts->uses = uses;
        experts->uses[experts->n_uses++] = (use) {stack, ids};
    }
    return uses != NULL;
}

bool llmaas_experts_use(llmaas_experts * experts, llmaas_stack * stack, struct ggml_tensor * product) {
    size_class *         size   = stack->size;
    struct ggml_tensor * weight = product->src[0];
    struct ggml_tensor * ids    = product->src[2];
    if (!size->slots && !make_slots(size)) {
        return false;
    }
    int32_t * slots = llmaas_graph_scratch(experts->graph, 0, (size_t) ggml_nelements(ids) * sizeof *slots);
    struct ggml_tensor * numbers = llmaas_graph_copy(experts->graph, ids);
    if (!slots || !numbers || !note_use(experts, stack, ids)) {
        return false;
    }
    numbers->data   = slots;
    numbers->buffer = NULL;
    numbers->nb[0]  = sizeof *slots;
    for (int i = 1; i < GGML_MAX_DIMS; i++) {
        numbers->nb[i] = numbers->nb[i - 1] * (size_t) numbers->ne[i - 1];
    }
    weight->data  = size->base;
    weight->ne[2] = (int64_t) size->n_slots;
    weight->nb[2] = size->n_bytes;
    weight->nb[3] = size->n_bytes * size->n_slots;
    product->src[2] = numbers;
    const struct choice c = {experts, experts->n_uses - 1, ++experts->n_turns, ids, slots};
    return llmaas_graph_step(experts->graph, choose, &c, sizeof c);
}

/* After a failure, forget all experts: they may be of products that were not computed, or reads may have failed. */
void llmaas_experts_end(llmaas_experts * experts) {
    llmaas_io_drain(experts->io);
    for (size_class * size = experts->sizes; size && llmaas_graph_failed(experts->graph); size = size->next) {
        for (size_t i = 0; i < size->n_touched; i++) {
            disown(&size->slots[i]);
        }
    }
    experts->graph = NULL;
}
