#include "stream/arena.h"

#include "llmaas/io.h"
#include "src/clock.h"
#include "src/grow.h"
#include "src/ring.h"

#include <stdlib.h>
#include <string.h>

#define PAGE 4096u

enum {
    READ_BYTES = 1 << 20,
    DEPTH      = 16,
    MAX_LOADS  = 256, /* most pieces in the arena */
    GAP_BYTES  = 24 << 10, /* shorter gaps between first columns take less time than another read */
};

/* Bytes of a piece that a graph uses. */
typedef struct use {
    llmaas_piece * piece;
    llmaas_strided of;
} use;

/* A piece in the arena, or being read into it. */
typedef struct load {
    use              of;
    size_t           at; /* offset in the arena */
    size_t           n_room;
    llmaas_io_read * reads;
    size_t           n_reads, n_started, n_capacity;
} load;

struct llmaas_arena {
    llmaas_io *    io;
    llmaas_reading reading;
    llmaas_graph * graph;    /* being computed */
    bool           is_blank; /* the graph failed, and the memory holds zeros */
    bool           is_begun; /* the graph has used nothing yet, so the plan is of the graph before */

    char * memory;
    size_t n_bytes, n_least;
    size_t n_widest, n_together; /* bytes of the longest piece used, and of the most pieces used together */
    load   loads[MAX_LOADS]; /* in order of use; a ring */
    size_t first, n_loads;

    use *  plan; /* of the graph */
    size_t n_plan, plan_capacity;
    size_t n_used;    /* uses of the plan that are over */
    size_t n_fetched; /* uses of the plan that were served, after a wait if needed */
    size_t n_loaded;  /* uses of the plan that have loads */
    size_t n_ahead;   /* uses of the plan that have loads for the next graph, or need none there */

    llmaas_arena_stats stats;
};

/* -- creation and destruction ------------------------------------------------------------------------------------ */

bool llmaas_arena_set_reading(llmaas_arena * arena, const llmaas_reading * reading) {
    llmaas_io *    io;
    const uint32_t depth = reading->depth ? reading->depth : DEPTH;
    const uint32_t n_all = depth + depth / 3 + 1; /* reads ahead get only a part of the depth */
    arena->reading       = *reading;
    if (llmaas_io_open(LLMAAS_IO_BEST, n_all < LLMAAS_IO_MAX_DEPTH ? n_all : LLMAAS_IO_MAX_DEPTH, &io) != LLMAAS_OK) {
        return false;
    }
    llmaas_io_close(arena->io); /* reads in flight complete in their place first */
    llmaas_io_register(io, arena->memory, arena->n_bytes);
    arena->io = io;
    return true;
}

llmaas_arena * llmaas_arena_new(const llmaas_reading * reading) {
    llmaas_arena * arena = calloc(1, sizeof *arena);
    if (arena && !llmaas_arena_set_reading(arena, reading)) {
        free(arena);
        return NULL;
    }
    return arena;
}

void llmaas_arena_free(llmaas_arena * arena) {
    if (!arena) {
        return;
    }
    llmaas_io_close(arena->io);
    llmaas_io_memory_free(arena->memory, arena->n_bytes);
    for (size_t i = 0; i < MAX_LOADS; i++) {
        free(arena->loads[i].reads);
    }
    free(arena->plan);
    free(arena);
}

llmaas_arena_stats llmaas_arena_read_stats(const llmaas_arena * arena) {
    llmaas_arena_stats stats = arena->stats;
    stats.n_bytes            = arena->n_bytes;
    return stats;
}

/* -- loads ------------------------------------------------------------------------------------------------------- */

static load * load_at(llmaas_arena * arena, size_t i) { return &arena->loads[(arena->first + i) % MAX_LOADS]; }

/* Return where a piece's bytes are. Whole pages are read, so they start as far into a page as in the file. */
static char * bytes_of(const llmaas_arena * arena, const load * l) {
    return arena->memory + l->at + l->of.piece->offset % PAGE;
}

static size_t room_for(const llmaas_piece * piece, size_t n_bytes) {
    return (piece->offset % PAGE + n_bytes + PAGE - 1) / PAGE * PAGE;
}

/* Find n bytes behind the last load. False if the first loads are in the way. */
static bool find_room(llmaas_arena * arena, size_t n, size_t * at) {
    if (arena->n_loads == 0) {
        *at = 0;
        return n <= arena->n_bytes;
    }
    const load * last = load_at(arena, arena->n_loads - 1);
    return llmaas_ring_place(arena->n_bytes, load_at(arena, 0)->at, last->at, last->at + last->n_room, n, at);
}

/* Add reads of whole pages for n bytes of the load's piece, from its byte `from` on. */
static bool add_reads(const llmaas_arena * arena, load * l, size_t from, size_t n) {
    const uint64_t start = l->of.piece->offset / PAGE * PAGE, end = l->of.piece->offset + from + n;
    const uint32_t n_most = arena->reading.n_bytes ? arena->reading.n_bytes : READ_BYTES;
    for (uint64_t at = (l->of.piece->offset + from) / PAGE * PAGE; at < end; at += n_most) {
        llmaas_io_read * reads = llmaas_grown(l->reads, l->n_reads, &l->n_capacity, sizeof *reads);
        if (!reads) {
            return false;
        }
        const uint64_t left = end - at, left_pages = (left + PAGE - 1) / PAGE * PAGE;
        l->reads            = reads;
        reads[l->n_reads++] = (llmaas_io_read) {
            .fd       = l->of.piece->fd,
            .offset   = at,
            .n_bytes  = (uint32_t) (left_pages < n_most ? left_pages : n_most),
            .n_needed = (uint32_t) (left < n_most ? left : n_most),
            .buffer   = arena->memory + l->at + (at - start),
            .is_ahead = true};
    }
    return true;
}

static bool set_reads(const llmaas_arena * arena, load * l) {
    const llmaas_strided of = l->of.of;
    bool                 ok = true;
    l->n_reads = l->n_started = 0;
    for (size_t from = 0; ok && from < of.n_bytes; from += of.stride) {
        const size_t n_left = of.n_bytes - from;
        ok = add_reads(arena, l, from, n_left < of.width ? n_left : of.width);
    }
    return ok;
}

/* Return what to read for a use: all of a piece that is to be kept, and gaps too short to be worth skipping. */
static use read_for(const use * u) {
    use read = *u;
    if (u->piece->is_wanted) {
        read.of.n_bytes = u->piece->n_bytes;
    }
    if (u->piece->is_wanted || u->of.stride - u->of.width <= GAP_BYTES) {
        read.of.stride = read.of.width = read.of.n_bytes;
    }
    return read;
}

/* Make a load for the next use that has none, in this graph or in the next one. NULL: there is none, or no room. */
static load * next_load(llmaas_arena * arena) {
    while (arena->n_loaded == arena->n_plan && arena->n_ahead < arena->n_plan &&
           arena->plan[arena->n_ahead].piece->is_wanted &&
           llmaas_piece_is_whole(arena->plan[arena->n_ahead].piece, &arena->plan[arena->n_ahead].of)) {
        arena->n_ahead++; /* it will be kept by then */
    }
    const bool is_ahead = arena->n_loaded == arena->n_plan;
    if ((is_ahead && arena->n_ahead == arena->n_plan) || arena->n_loads == MAX_LOADS) {
        return NULL;
    }
    const use of = arena->plan[is_ahead ? arena->n_ahead : arena->n_loaded];
    load *    l  = load_at(arena, arena->n_loads);
    size_t    at;
    const size_t n_room = room_for(of.piece, of.of.n_bytes);
    if (!find_room(arena, n_room, &at)) {
        return NULL;
    }
    l->of     = of;
    l->at     = at;
    l->n_room = n_room;
    if (!set_reads(arena, l)) {
        return NULL;
    }
    arena->n_loads++;
    *(is_ahead ? &arena->n_ahead : &arena->n_loaded) += 1;
    return l;
}

/* Start as many reads as there is room for, none for a graph that failed. This may wait for the device. */
static void submit(llmaas_arena * arena) {
    const uint64_t started = llmaas_now_ns(), n_read = arena->stats.n_read;
    load * l = arena->n_loads ? load_at(arena, arena->n_loads - 1) : NULL;
    l        = l && l->n_started < l->n_reads ? l : next_load(arena);
    for (; l && !llmaas_graph_failed(arena->graph); l = next_load(arena)) {
        for (; l->n_started < l->n_reads && llmaas_io_room_ahead(arena->io) > 0; l->n_started++) {
            llmaas_io_start(arena->io, &l->reads[l->n_started]);
            arena->stats.n_read += l->reads[l->n_started].n_bytes;
        }
        if (l->n_started < l->n_reads) {
            break;
        }
    }
    llmaas_io_poll(arena->io);
    arena->stats.stalled_ns += arena->stats.n_read > n_read ? llmaas_now_ns() - started : 0;
}

/* Wait for a load. False if a read failed. Later loads start only after all its reads have started. */
static bool await(llmaas_arena * arena, load * l) {
    bool is_ok = true;
    for (size_t i = 0; i < l->n_reads; i++) {
        llmaas_io_wait(arena->io, &l->reads[i]);
        is_ok = is_ok && l->reads[i].error == 0;
        submit(arena);
    }
    return is_ok;
}

/* Forget all loads but the first n. Their reads must finish before others use the same memory. */
static void cut_loads(llmaas_arena * arena, size_t n) {
    if (n < arena->n_loads) {
        llmaas_io_drain(arena->io);
    }
    while (arena->n_loads > n) {
        const load * l = load_at(arena, --arena->n_loads);
        for (size_t i = 0; i < l->n_started; i++) {
            arena->stats.n_wasted += l->reads[i].n_bytes;
        }
    }
}

/* Release the oldest load; keep what is wanted of its piece. */
static void release(llmaas_arena * arena) {
    const load * l = load_at(arena, 0);
    if (!llmaas_graph_failed(arena->graph)) {
        llmaas_piece_keep(l->of.piece, &l->of.of, bytes_of(arena, l));
    }
    arena->first = (arena->first + 1) % MAX_LOADS;
    arena->n_loads--;
    arena->n_used++;
}

/* -- memory ------------------------------------------------------------------------------------------------------ */

/* Make the arena large enough for what is used together plus one of the largest pieces, which is read meanwhile. Where
 * several pieces are used together, add another one for the loss at the ring's end. */
static bool make_memory(llmaas_arena * arena) {
    const size_t n_end    = arena->n_together > arena->n_widest ? arena->n_widest : 0;
    const size_t n_wanted = arena->n_together + arena->n_widest + n_end;
    const size_t n_least  = n_wanted > arena->n_least ? n_wanted : arena->n_least;
    const size_t n_bytes  = (n_least + LLMAAS_IO_HUGE_PAGE - 1) / LLMAAS_IO_HUGE_PAGE * LLMAAS_IO_HUGE_PAGE;
    if (n_bytes == arena->n_bytes) {
        return true;
    }
    cut_loads(arena, 0);
    char * memory = llmaas_io_memory(n_bytes);
    if (!memory) {
        return false;
    }
    llmaas_io_register(arena->io, memory, n_bytes);
    llmaas_io_memory_free(arena->memory, arena->n_bytes);
    arena->memory  = memory;
    arena->n_bytes = n_bytes;
    return true;
}

void llmaas_arena_set_least(llmaas_arena * arena, uint64_t n_bytes) {
    arena->n_least = n_bytes;
    if (n_bytes == 0) {
        cut_loads(arena, 0);
        llmaas_io_register(arena->io, NULL, 0);
        llmaas_io_memory_free(arena->memory, arena->n_bytes);
        arena->memory  = NULL;
        arena->n_bytes = 0;
    }
}

/* -- computing a graph ------------------------------------------------------------------------------------------- */

void llmaas_arena_begin(llmaas_arena * arena, llmaas_graph * graph) {
    arena->graph    = graph;
    arena->is_blank = false;
    arena->is_begun = true;
}

/* Let a failed graph go on with zeros: other bytes could leave NaN in cells, and 0 times that is NaN. */
static void make_blank(llmaas_arena * arena) {
    llmaas_graph_fail(arena->graph);
    if (!arena->is_blank) {
        llmaas_io_drain(arena->io);
        memset(arena->memory, 0, arena->n_bytes);
    }
    arena->is_blank = true;
}

/* Argument of the step before a product, which frees what earlier products used and waits for what this one uses. */
struct fetch {
    llmaas_arena *       arena;
    size_t               index; /* in the plan */
    size_t               first; /* first use that stays in memory until then */
    struct ggml_tensor * weight;
};

static void fetch(void * arg, int ith, int nth) {
    const struct fetch * f     = arg;
    llmaas_arena *       arena = f->arena;
    (void) nth;
    if (ith != 0) {
        return;
    }
    while (arena->n_used < f->first && !llmaas_graph_failed(arena->graph)) {
        release(arena);
    }
    const uint64_t started = llmaas_now_ns(), before = arena->stats.stalled_ns;
    const size_t   i       = f->index - arena->n_used;
    submit(arena);
    if (!llmaas_graph_failed(arena->graph) && i < arena->n_loads && await(arena, load_at(arena, i))) {
        arena->n_fetched = f->index + 1;
        f->weight->data  = bytes_of(arena, load_at(arena, i));
    } else {
        make_blank(arena);
        f->weight->data = arena->memory;
    }
    arena->stats.stalled_ns = before + llmaas_now_ns() - started;
}

bool llmaas_arena_use(
    llmaas_arena * arena, llmaas_piece * piece, const llmaas_strided * used, struct ggml_tensor * weight, size_t n_before) {
    arena->n_plan   = arena->is_begun ? 0 : arena->n_plan;
    arena->is_begun = false;
    use * plan = llmaas_grown(arena->plan, arena->n_plan, &arena->plan_capacity, sizeof *plan);
    if (!plan) {
        return false;
    }
    arena->plan = plan;
    const struct fetch arg = {arena, arena->n_plan, arena->n_plan - n_before, weight};
    arena->plan[arena->n_plan++] = (use) {piece, *used};
    size_t n_together = 0, n_room = room_for(piece, piece->n_bytes);
    for (size_t i = arg.first; i < arena->n_plan; i++) {
        n_together += room_for(arena->plan[i].piece, arena->plan[i].piece->n_bytes);
    }
    arena->n_widest   = n_room > arena->n_widest ? n_room : arena->n_widest;
    arena->n_together = n_together > arena->n_together ? n_together : arena->n_together;
    return llmaas_graph_step(arena->graph, fetch, &arg, sizeof arg);
}

/* Return whether a load has all that a use reads. */
static bool has(const load * l, const use * u) {
    const bool is_same = l->of.of.stride == u->of.stride && l->of.of.width == u->of.width;
    return l->of.piece == u->piece && l->of.of.n_bytes >= u->of.n_bytes && (is_same || l->of.of.width == l->of.of.stride);
}

/* Return how many of the first loads match the plan. */
static size_t n_foreseen(llmaas_arena * arena) {
    size_t i = 0;
    while (i < arena->n_loads && i < arena->n_plan && has(load_at(arena, i), &arena->plan[i])) {
        i++;
    }
    return i;
}

/* A graph that uses nothing leaves time to read ahead for the next one. */
bool llmaas_arena_start(llmaas_arena * arena) {
    if (arena->is_begun) {
        submit(arena);
        return true;
    }
    if (!make_memory(arena)) {
        return false;
    }
    for (size_t i = 0; i < arena->n_plan; i++) {
        arena->plan[i] = read_for(&arena->plan[i]);
    }
    cut_loads(arena, n_foreseen(arena));
    arena->n_used = arena->n_ahead = arena->n_fetched = 0;
    arena->n_loaded = arena->n_loads;
    submit(arena);
    return true;
}

void llmaas_arena_end(llmaas_arena * arena) {
    if (arena->n_plan > 0 && arena->n_fetched == arena->n_plan && !llmaas_graph_failed(arena->graph)) {
        while (arena->n_used < arena->n_plan) {
            release(arena);
        }
        submit(arena);
    } else if (arena->n_plan > 0) { /* the graph was aborted, or a read failed */
        cut_loads(arena, 0);
    }
    arena->graph = NULL;
}
