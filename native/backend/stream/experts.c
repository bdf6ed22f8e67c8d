#include "stream/experts.h"

#include "llmaas/io.h"
#include "src/clock.h"
#include "src/grow.h"
#include "stream/slots.h"

#include <stdlib.h>
#include <string.h>

#define PAGE 4096u

enum {
    READ_BYTES = 1 << 20,
    DEPTH      = 16,
    AGE        = 32, /* graphs after which use counts are halved */
    GROUP      = 3, /* products that usually share one choice of experts: gate, up and down */
};

/* The slots of one size. */
typedef struct size_class {
    struct size_class * next;
    size_t              n_bytes; /* bytes of a slot */
    size_t              n_least; /* most experts of one weight */
    llmaas_slots *      slots;
    size_t              n_reads; /* reads of a slot */
    llmaas_io_read *    reads;   /* [slots][n_reads]; NULL until the first graph */
} size_class;

struct llmaas_stack {
    llmaas_stack * next;
    size_class *   size;
    int            fd;
    uint64_t       offset;
    int32_t        n_experts;
    llmaas_cached  experts[];
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
    size_t         n_served; /* uses whose experts were awaited */
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

void llmaas_experts_free(llmaas_experts * experts) {
    if (!experts) {
        return;
    }
    llmaas_io_close(experts->io);
    for (size_class * size = experts->sizes; size;) {
        size_class * next = size->next;
        llmaas_slots_free(size->slots);
        free(size->reads);
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
    if (!made) {
        return NULL;
    }
    *made = (size_class) {.next = experts->sizes, .n_bytes = n_bytes, .slots = llmaas_slots_new(n_bytes)};
    if (!made->slots) {
        free(made);
        return NULL;
    }
    return experts->sizes = made;
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
    size->n_least = (size_t) n_experts > size->n_least ? (size_t) n_experts : size->n_least;
    llmaas_slots_expect(size->slots, (size_t) n_experts);
    llmaas_slots_resize(size->slots, size->n_least);
    experts->stats.n_bytes += (uint64_t) n_experts * n_bytes;
    return stack;
}

/* -- memory ------------------------------------------------------------------------------------------------------ */

/* Give each size memory for the same share of its experts, but no less than a product may need. */
void llmaas_experts_set_memory(llmaas_experts * experts, uint64_t n_bytes) {
    const double share = (double) n_bytes / (double) experts->stats.n_bytes;
    for (size_class * size = experts->sizes; size; size = size->next) {
        const double n_all = (double) (llmaas_slots_all(size->slots) / size->n_bytes);
        const size_t n     = (size_t) (share < 1 ? share * n_all : n_all);
        llmaas_slots_resize(size->slots, n > size->n_least ? n : size->n_least);
    }
}

llmaas_expert_stats llmaas_experts_read_stats(const llmaas_experts * experts) {
    llmaas_expert_stats stats = experts->stats;
    for (const size_class * size = experts->sizes; size; size = size->next) {
        stats.n_least += size->n_least * size->n_bytes;
        stats.n_kept += llmaas_slots_kept(size->slots);
    }
    return stats;
}

/* -- reading ----------------------------------------------------------------------------------------------------- */

/* Make room for the reads of all slots, none of which is in flight. False if out of memory. */
static bool make_reads(const llmaas_experts * experts, size_class * size) {
    const size_t n = (size->n_bytes + experts->n_read_most - 1) / experts->n_read_most;
    if (n == size->n_reads) {
        return true;
    }
    llmaas_io_read * reads = calloc(llmaas_slots_all(size->slots) / size->n_bytes * n, sizeof *reads);
    if (!reads) {
        return false;
    }
    for (size_t i = 0; i < llmaas_slots_kept(size->slots) / size->n_bytes * n; i++) {
        reads[i].is_done = true; /* experts in slots stay there */
    }
    free(size->reads);
    size->reads   = reads;
    size->n_reads = n;
    return true;
}

static llmaas_io_read * reads_of(const llmaas_stack * stack, int32_t expert) {
    return stack->size->reads + (size_t) stack->experts[expert].slot * stack->size->n_reads;
}

static void start_reads(llmaas_experts * experts, const llmaas_stack * stack, int32_t expert) {
    const size_class * size  = stack->size;
    llmaas_io_read *   reads = reads_of(stack, expert);
    const uint64_t     begin = stack->offset + (uint64_t) expert * size->n_bytes;
    char *             to    = llmaas_slots_base(size->slots) + (size_t) stack->experts[expert].slot * size->n_bytes;
    for (size_t i = 0; i < size->n_reads; i++) {
        const size_t   from = i * experts->n_read_most, left = size->n_bytes - from;
        const uint32_t n    = (uint32_t) (left < experts->n_read_most ? left : experts->n_read_most);
        if (llmaas_io_room(experts->io) == 0) {
            llmaas_io_drain(experts->io);
        }
        reads[i] = (llmaas_io_read) {
            .fd = stack->fd, .offset = begin + from, .n_bytes = n, .n_needed = n, .buffer = to + from};
        llmaas_io_start(experts->io, &reads[i]);
        experts->stats.n_read += n;
    }
}

/* Keep an expert until `turn`, if it is in a slot. Return whether it is. */
static bool stays(llmaas_experts * experts, llmaas_stack * stack, int32_t expert, uint64_t turn) {
    llmaas_cached * cached = &stack->experts[expert];
    if (cached->slot >= 0 && llmaas_slots_hold(stack->size->slots, cached, turn)) {
        cached->n_uses++;
        experts->stats.n_hits++;
    }
    return cached->slot >= 0;
}

/* Start reading an expert into a slot that is not needed from `now` on. False if there is none. */
static bool fetch(llmaas_experts * experts, llmaas_stack * stack, int32_t expert, uint64_t turn, uint64_t now) {
    if (!llmaas_slots_replace(stack->size->slots, &stack->experts[expert], turn, now)) {
        return false;
    }
    stack->experts[expert].n_uses++;
    experts->stats.n_misses++;
    start_reads(experts, stack, expert);
    return true;
}

static bool await(llmaas_experts * experts, const llmaas_stack * stack, int32_t expert) {
    llmaas_io_read * reads = reads_of(stack, expert);
    bool             ok    = true;
    for (size_t i = 0; i < stack->size->n_reads; i++) {
        if (!reads[i].is_done) {
            llmaas_io_wait(experts->io, &reads[i]);
        }
        ok = ok && reads[i].error == 0;
    }
    return ok;
}

/* Forget the experts whose reads failed, when none is in flight. */
static void forget_failed(llmaas_experts * experts) {
    for (llmaas_stack * stack = experts->stacks; stack; stack = stack->next) {
        for (int32_t i = 0; i < stack->n_experts; i++) {
            if (stack->experts[i].slot >= 0 && !await(experts, stack, i)) {
                llmaas_slots_drop(stack->size->slots, &stack->experts[i]);
            }
        }
    }
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
    experts->n_uses = experts->n_served = 0;
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
        if (llmaas_slots_count(stack->size->slots) >= GROUP * stack->size->n_least) {
            fetch_all(c, stack, c->turn + (i - c->index));
        }
    }
}

/* Let the rest of a failed graph compute with zeros, as from the arena: a slot may hold a part of an expert, or one of
 * another type. */
static void make_blank(const struct choice * c) {
    llmaas_graph_fail(c->experts->graph);
    llmaas_io_drain(c->experts->io);
    llmaas_slots_blank(c->experts->uses[c->index].stack->size->slots);
    memset(c->slots, 0, (size_t) ggml_nelements(c->ids) * sizeof *c->slots);
}

/* Read the experts and wait for them. False if an expert does not exist or cannot be read. */
static bool serve(const struct choice * c) {
    llmaas_stack * stack = c->experts->uses[c->index].stack;
    bool           ok    = fetch_all(c, stack, c->turn);
    if (ok) {
        fetch_later(c);
    }
    for (int64_t i = 0; ok && i < ggml_nelements(c->ids); i++) {
        const int32_t expert = id_at(c->ids, i);
        ok          = await(c->experts, stack, expert);
        c->slots[i] = stack->experts[expert].slot;
    }
    c->experts->n_served = c->index + 1;
    return ok;
}

static void choose(void * arg, int ith, int nth) {
    const struct choice * c       = arg;
    const uint64_t        started = llmaas_now_ns();
    (void) nth;
    if (ith != 0) {
        return;
    }
    if (llmaas_graph_failed(c->experts->graph) || !serve(c)) {
        make_blank(c);
    }
    c->experts->stats.stalled_ns += llmaas_now_ns() - started;
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
    char *               base   = llmaas_slots_base(size->slots);
    if (!base || !make_reads(experts, size)) {
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
    weight->data  = base;
    weight->ne[2] = (int64_t) llmaas_slots_count(size->slots);
    weight->nb[2] = size->n_bytes;
    weight->nb[3] = size->n_bytes * (size_t) weight->ne[2];
    product->src[2] = numbers;
    const struct choice c = {experts, experts->n_uses - 1, ++experts->n_turns, ids, slots};
    return llmaas_graph_step(experts->graph, choose, &c, sizeof c);
}

/* After a failure, forget all experts: they may be of products that were not computed, or reads may have failed. If the
 * graph was aborted, nobody has looked whether the last reads succeeded. */
void llmaas_experts_end(llmaas_experts * experts) {
    llmaas_io_drain(experts->io);
    for (size_class * size = experts->sizes; size && llmaas_graph_failed(experts->graph); size = size->next) {
        llmaas_slots_clear(size->slots);
    }
    if (experts->n_served < experts->n_uses) {
        forget_failed(experts);
    }
    experts->graph = NULL;
}
