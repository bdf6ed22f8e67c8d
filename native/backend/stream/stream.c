#include "stream/stream.h"

#include "base/fork_lock.h"
#include "base/pages.h"
#include "llmaas/io.h"
#include "src/clock.h"
#include "src/grow.h"
#include "src/ring.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define PAGE 4096u

enum {
    READ_BYTES = 1 << 20,
    DEPTH      = 16,
    MAX_LOADS  = 256, /* most pieces in the arena */
    LITTLE     = 2 << 20, /* bytes by which other memory may grow before pieces are dropped */
    AGE        = 32, /* graphs after which what was used in between counts as used of late */
    GAP_BYTES  = 24 << 10, /* shorter gaps between first columns take less time than another read */
};

/* Bytes of a piece that a graph uses. */
typedef struct use {
    llmaas_piece * piece;
    llmaas_stretch  of;
} use;

/* A piece in the arena, or being read into it. */
typedef struct load {
    use              of;
    size_t           at; /* offset in the arena */
    size_t           n_room;
    llmaas_io_read * reads;
    size_t           n_reads, n_started, n_capacity;
} load;

struct llmaas_stream {
    llmaas_fork_lock lock;
    llmaas_io *     io;
    llmaas_reading  reading;
    llmaas_graph *  graph; /* being computed */

    llmaas_experts *  experts;  /* NULL: there are none */
    llmaas_channels * channels; /* NULL: there are none */

    llmaas_piece ** pieces;
    size_t          n_pieces, pieces_capacity;
    size_t          n_turns; /* pieces that some graph has used */
    uint64_t        n_graphs;
    uint64_t        n_kept_set, n_kept_max, n_arena_min; /* as set by the caller; n_kept_max: n_kept_set less what
                                                          * n_more takes */
    int64_t         n_more;
    bool            is_stale; /* the choice of wanted pieces must be repeated */

    char * arena;
    size_t n_arena, n_widest, n_together; /* bytes of the arena, of the longest piece used, and of the most pieces used
                                           * together */
    load   loads[MAX_LOADS]; /* in order of use; a ring */
    size_t first, n_loads;

    use *  plan; /* of the graph */
    size_t n_plan, plan_capacity;
    size_t n_used;   /* uses of the plan that are over */
    size_t n_fetched; /* uses of the plan that were served, after a wait if needed */
    size_t n_loaded; /* uses of the plan that have loads */
    size_t n_ahead;  /* uses of the plan that have loads for the next graph, or need none there */

    llmaas_stream_stats stats;
};

/* -- creation and destruction ------------------------------------------------------------------------------------ */

/* Open an engine for the current settings. Reads in flight complete in their place first. */
static bool open_io(llmaas_stream * stream) {
    llmaas_io *    io;
    const uint32_t depth = stream->reading.depth ? stream->reading.depth : DEPTH;
    const uint32_t n_all = depth + depth / 3 + 1; /* reads ahead get only a part of the depth */
    if (llmaas_io_open(LLMAAS_IO_BEST, n_all < LLMAAS_IO_MAX_DEPTH ? n_all : LLMAAS_IO_MAX_DEPTH, &io) != LLMAAS_OK) {
        return false;
    }
    llmaas_io_close(stream->io);
    llmaas_io_register(io, stream->arena, stream->n_arena);
    stream->io = io;
    return true;
}

llmaas_stream * llmaas_stream_new(void) {
    llmaas_stream * stream = calloc(1, sizeof *stream);
    if (!stream || !llmaas_fork_lock_init(&stream->lock, NULL)) {
        free(stream);
        return NULL;
    }
    stream->reading.n_gap = -1;
    if (!open_io(stream)) {
        llmaas_fork_lock_destroy(&stream->lock);
        free(stream);
        return NULL;
    }
    return stream;
}

void llmaas_stream_free(llmaas_stream * stream) {
    if (!stream) {
        return;
    }
    llmaas_io_close(stream->io);
    llmaas_experts_free(stream->experts);
    llmaas_channels_free(stream->channels);
    llmaas_io_memory_free(stream->arena, stream->n_arena);
    for (size_t i = 0; i < MAX_LOADS; i++) {
        free(stream->loads[i].reads);
    }
    for (size_t i = 0; i < stream->n_pieces; i++) {
        free(stream->pieces[i]);
    }
    free(stream->pieces);
    free(stream->plan);
    llmaas_fork_lock_destroy(&stream->lock);
    free(stream);
}

llmaas_piece * llmaas_stream_add(llmaas_stream * stream, const llmaas_piece * piece) {
    llmaas_piece ** pieces = llmaas_grown(stream->pieces, stream->n_pieces, &stream->pieces_capacity, sizeof *pieces);
    stream->pieces         = pieces ? pieces : stream->pieces;
    llmaas_piece * added   = pieces ? malloc(sizeof *added) : NULL;
    if (!added) {
        return NULL;
    }
    *added      = *piece;
    added->turn = -1;
    stream->stats.n_bytes += piece->n_bytes;
    return stream->pieces[stream->n_pieces++] = added;
}

llmaas_experts * llmaas_stream_experts(llmaas_stream * stream) {
    stream->experts = stream->experts ? stream->experts : llmaas_experts_new(&stream->reading);
    return stream->experts;
}

llmaas_channels * llmaas_stream_channels(llmaas_stream * stream) {
    stream->channels = stream->channels ? stream->channels : llmaas_channels_new(stream, &stream->reading, stream->n_arena_min);
    return stream->channels;
}

void llmaas_stream_pass(llmaas_stream * stream, llmaas_piece * piece) {
    pthread_mutex_lock(&stream->lock.mutex);
    stream->stats.n_bytes -= piece->is_passing ? 0 : piece->n_bytes;
    stream->is_stale  = true;
    piece->is_passing = true;
    pthread_mutex_unlock(&stream->lock.mutex);
}

static bool set_reading(llmaas_stream * stream, const llmaas_reading * reading) {
    stream->reading = *reading;
    return open_io(stream) && (!stream->experts || llmaas_experts_set_reading(stream->experts, reading)) &&
           (!stream->channels || llmaas_channels_set_reading(stream->channels, reading));
}

bool llmaas_stream_set_reading(llmaas_stream * stream, const llmaas_reading * reading) {
    pthread_mutex_lock(&stream->lock.mutex);
    const bool ok = stream->lock.is_void || set_reading(stream, reading);
    pthread_mutex_unlock(&stream->lock.mutex);
    return ok;
}

void llmaas_stream_read_stats(llmaas_stream * stream, llmaas_stream_stats * stats) {
    pthread_mutex_lock(&stream->lock.mutex);
    *stats         = stream->stats;
    stats->n_arena = stream->n_arena;
    if (stream->experts) {
        const llmaas_expert_stats experts = llmaas_experts_read_stats(stream->experts);
        stats->n_bytes += experts.n_bytes;
        stats->n_kept += experts.n_kept;
        stats->n_read += experts.n_read;
        stats->stalled_ns += experts.stalled_ns;
        stats->n_least   = experts.n_least;
        stats->n_hits    = experts.n_hits;
        stats->n_misses  = experts.n_misses;
    }
    if (stream->channels) {
        const llmaas_channel_stats channels = llmaas_channels_read_stats(stream->channels);
        stats->n_bytes += channels.n_bytes;
        stats->n_kept += channels.n_kept;
        stats->n_read += channels.n_read;
        stats->n_wasted += channels.n_wasted;
        stats->stalled_ns += channels.stalled_ns;
        stats->n_operands         = channels.n_operands;
        stats->n_passing          = channels.n_passing;
        stats->n_channel_hits     = channels.n_hits;
        stats->n_channel_misses   = channels.n_misses;
        stats->n_channel_preloads = channels.n_preloads;
    }
    pthread_mutex_unlock(&stream->lock.mutex);
}

/* -- choosing the kept pieces ------------------------------------------------------------------------------------ */

/* Return how much of a piece graphs used of late: 0 nothing, 1 a part, 2 all of it. */
static int use_of(const llmaas_piece * piece) { return piece->n_lately < piece->n_bytes ? piece->n_lately > 0 : 2; }

static int by_use_and_turn(const void * a, const void * b) {
    const llmaas_piece * x = *(llmaas_piece * const *) a, * y = *(llmaas_piece * const *) b;
    return use_of(x) != use_of(y) ? use_of(y) - use_of(x) : (x->turn > y->turn) - (x->turn < y->turn);
}

static void note(llmaas_stream * stream, llmaas_piece * piece, size_t n_bytes) {
    const int before = use_of(piece);
    piece->n_now     = n_bytes > piece->n_now ? n_bytes : piece->n_now;
    piece->n_lately  = n_bytes > piece->n_lately ? n_bytes : piece->n_lately;
    stream->is_stale = stream->is_stale || use_of(piece) != before;
}

/* Start an interval: what the last interval used is what counts as used of late. */
static void age(llmaas_stream * stream) {
    for (size_t i = 0; i < stream->n_pieces; i++) {
        llmaas_piece * piece  = stream->pieces[i];
        const int      before = use_of(piece);
        piece->n_lately       = piece->n_now;
        piece->n_now          = 0;
        stream->is_stale      = stream->is_stale || use_of(piece) != before;
    }
}

/* Return the memory left beside pieces. Pieces come first because every token uses all of them, but only some experts
 * and channels. */
static uint64_t rest_of_memory(const llmaas_stream * stream) {
    const uint64_t n_pieces = stream->stats.n_bytes;
    return stream->n_kept_max > n_pieces ? stream->n_kept_max - n_pieces : 0;
}

/* Return the experts' share of that memory. Experts and channels share it by size, but the experts of one product
 * always have room. */
static uint64_t experts_share(const llmaas_stream * stream) {
    if (!stream->experts) {
        return 0;
    }
    const llmaas_expert_stats experts = llmaas_experts_read_stats(stream->experts);
    const uint64_t n_channels = stream->channels ? llmaas_channels_read_stats(stream->channels).n_bytes : 0;
    const double   share      = (double) experts.n_bytes / (double) (experts.n_bytes + n_channels);
    const uint64_t n_bytes    = (uint64_t) (share * (double) rest_of_memory(stream));
    return n_bytes > experts.n_least ? n_bytes : experts.n_least;
}

static uint64_t channels_share(const llmaas_stream * stream) {
    const uint64_t n_left = rest_of_memory(stream), n_experts = experts_share(stream);
    return n_left > n_experts ? n_left - n_experts : 0;
}

/* Choose the pieces to keep. Pieces that no graph has used are not wanted. */
static void choose_wanted(llmaas_stream * stream) {
    uint64_t n_bytes = experts_share(stream);
    if (stream->n_pieces == 0) {
        return;
    }
    qsort(stream->pieces, stream->n_pieces, sizeof *stream->pieces, by_use_and_turn);
    for (size_t i = 0; i < stream->n_pieces; i++) {
        llmaas_piece * piece = stream->pieces[i];
        const bool     may_be = piece->turn >= 0 && !piece->is_passing;
        n_bytes += may_be ? piece->n_bytes : 0;
        piece->is_wanted = may_be && n_bytes <= stream->n_kept_max;
    }
}

static void drop(llmaas_stream * stream, llmaas_piece * piece) {
    llmaas_pages_release(llmaas_pages_in(piece->home, piece->n_bytes));
    piece->is_kept = false;
    stream->stats.n_kept -= piece->n_bytes;
}

static void drop_unwanted(llmaas_stream * stream) {
    for (size_t i = 0; i < stream->n_pieces; i++) {
        if (stream->pieces[i]->is_kept && !stream->pieces[i]->is_wanted) {
            drop(stream, stream->pieces[i]);
        }
    }
}

static void adapt(llmaas_stream * stream) {
    if (stream->experts) {
        llmaas_experts_set_memory(stream->experts, experts_share(stream));
    }
    if (stream->channels) {
        llmaas_channels_set_memory(stream->channels, channels_share(stream));
    }
    choose_wanted(stream);
    drop_unwanted(stream);
    stream->is_stale = false;
}

static void keep(llmaas_stream * stream, llmaas_piece * piece, const char * bytes) {
    memcpy(piece->home, bytes, piece->n_bytes);
    piece->is_kept = true;
    stream->stats.n_kept += piece->n_bytes;
}

/* -- the arena --------------------------------------------------------------------------------------------------- */

static load * load_at(llmaas_stream * stream, size_t i) { return &stream->loads[(stream->first + i) % MAX_LOADS]; }

/* Return where a piece's bytes are. Whole pages are read, so they start as far into a page as in the file. */
static char * bytes_of(const llmaas_stream * stream, const load * l) {
    return stream->arena + l->at + l->of.piece->offset % PAGE;
}

static size_t room_for(const llmaas_piece * piece, size_t n_bytes) {
    return (piece->offset % PAGE + n_bytes + PAGE - 1) / PAGE * PAGE;
}

/* Find n bytes behind the last load. False if the first loads are in the way. */
static bool find_room(llmaas_stream * stream, size_t n, size_t * at) {
    if (stream->n_loads == 0) {
        *at = 0;
        return n <= stream->n_arena;
    }
    const load * last = load_at(stream, stream->n_loads - 1);
    return llmaas_ring_place(stream->n_arena, load_at(stream, 0)->at, last->at, last->at + last->n_room, n, at);
}

/* Add reads of whole pages for n bytes of the load's piece, from its byte `from` on. */
static bool add_reads(const llmaas_stream * stream, load * l, size_t from, size_t n) {
    const uint64_t start = l->of.piece->offset / PAGE * PAGE, end = l->of.piece->offset + from + n;
    const uint32_t n_most = stream->reading.n_bytes ? stream->reading.n_bytes : READ_BYTES;
    for (uint64_t at = (l->of.piece->offset + from) / PAGE * PAGE; at < end; at += n_most) {
        llmaas_io_read * reads = llmaas_grown(l->reads, l->n_reads, &l->n_capacity, sizeof *reads);
        if (!reads) {
            return false;
        }
        const uint64_t left = end - at, left_pages = (left + PAGE - 1) / PAGE * PAGE;
        l->reads               = reads;
        reads[l->n_reads++] = (llmaas_io_read) {
            .fd       = l->of.piece->fd,
            .offset   = at,
            .n_bytes  = (uint32_t) (left_pages < n_most ? left_pages : n_most),
            .n_needed = (uint32_t) (left < n_most ? left : n_most),
            .buffer   = stream->arena + l->at + (at - start),
            .is_ahead = true};
    }
    return true;
}

static bool set_reads(const llmaas_stream * stream, load * l) {
    const llmaas_stretch of = l->of.of;
    bool                ok = true;
    l->n_reads = l->n_started = 0;
    for (size_t from = 0; ok && from < of.n_bytes; from += of.stride) {
        const size_t n_left = of.n_bytes - from;
        ok = add_reads(stream, l, from, n_left < of.width ? n_left : of.width);
    }
    return ok;
}

static bool is_whole(const use * u) { return u->of.n_bytes == u->piece->n_bytes && u->of.width == u->of.stride; }

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

/* Make a load for the next use that has none: later in this graph, or in the next one. NULL if there is none, no room,
 * or no memory. */
static load * next_load(llmaas_stream * stream) {
    while (stream->n_loaded == stream->n_plan && stream->n_ahead < stream->n_plan &&
           stream->plan[stream->n_ahead].piece->is_wanted && is_whole(&stream->plan[stream->n_ahead])) {
        stream->n_ahead++; /* it will be kept by then */
    }
    const bool is_ahead = stream->n_loaded == stream->n_plan;
    if ((is_ahead && stream->n_ahead == stream->n_plan) || stream->n_loads == MAX_LOADS) {
        return NULL;
    }
    const use of = stream->plan[is_ahead ? stream->n_ahead : stream->n_loaded];
    load *    l  = load_at(stream, stream->n_loads);
    size_t    at;
    const size_t n_room = room_for(of.piece, of.of.n_bytes);
    if (!find_room(stream, n_room, &at)) {
        return NULL;
    }
    l->of     = of;
    l->at     = at;
    l->n_room = n_room;
    if (!set_reads(stream, l)) {
        return NULL;
    }
    stream->n_loads++;
    *(is_ahead ? &stream->n_ahead : &stream->n_loaded) += 1;
    return l;
}

/* Start as many reads as there is room for. */
static void pump(llmaas_stream * stream) {
    load * l = stream->n_loads ? load_at(stream, stream->n_loads - 1) : NULL;
    l        = l && l->n_started < l->n_reads ? l : next_load(stream);
    for (; l; l = next_load(stream)) {
        for (; l->n_started < l->n_reads && llmaas_io_room_ahead(stream->io) > 0; l->n_started++) {
            llmaas_io_start(stream->io, &l->reads[l->n_started]);
            stream->stats.n_read += l->reads[l->n_started].n_bytes;
        }
        if (l->n_started < l->n_reads) {
            break;
        }
    }
    llmaas_io_poll(stream->io);
}

/* Wait for a load. False if a read failed. Later loads start only after all its reads have started. */
static bool await(llmaas_stream * stream, load * l) {
    bool is_ok = true;
    for (size_t i = 0; i < l->n_reads; i++) {
        llmaas_io_wait(stream->io, &l->reads[i]);
        is_ok = is_ok && l->reads[i].error == 0;
        pump(stream);
    }
    return is_ok;
}

/* Forget all loads but the first n. Their reads must finish before others use the same memory. */
static void cut_loads(llmaas_stream * stream, size_t n) {
    if (n < stream->n_loads) {
        llmaas_io_drain(stream->io);
    }
    while (stream->n_loads > n) {
        const load * l = load_at(stream, --stream->n_loads);
        for (size_t i = 0; i < l->n_started; i++) {
            stream->stats.n_wasted += l->reads[i].n_bytes;
        }
    }
}

static void release(llmaas_stream * stream, load * l) {
    llmaas_piece * piece = l->of.piece;
    if (piece->is_wanted && !piece->is_kept && is_whole(&l->of) && !llmaas_graph_failed(stream->graph)) {
        keep(stream, piece, bytes_of(stream, l));
    }
    stream->first = (stream->first + 1) % MAX_LOADS;
    stream->n_loads--;
    stream->n_used++;
}

/* -- computing a graph ------------------------------------------------------------------------------------------- */

static void make_way(llmaas_stream * stream, int64_t n_more) {
    stream->n_more += n_more;
    const uint64_t n_taken = stream->n_more > LITTLE ? (uint64_t) stream->n_more : 0;
    stream->n_kept_max     = stream->n_kept_set > n_taken ? stream->n_kept_set - n_taken : 0;
    stream->is_stale     = true;
}

bool llmaas_stream_begin(llmaas_stream * stream, llmaas_graph * graph, int64_t n_more) {
    pthread_mutex_lock(&stream->lock.mutex);
    if (stream->lock.is_void) {
        pthread_mutex_unlock(&stream->lock.mutex);
        return false;
    }
    stream->lock.is_computing = true;
    if (n_more != 0) {
        make_way(stream, n_more);
    }
    stream->graph  = graph;
    stream->n_plan = 0;
    if (++stream->n_graphs % AGE == 0) {
        age(stream);
    }
    if (stream->is_stale) {
        adapt(stream);
    }
    if (stream->experts) {
        llmaas_experts_begin(stream->experts, graph);
    }
    if (stream->channels) {
        llmaas_channels_begin(stream->channels, graph);
    }
    return true;
}

/* Argument of the step before a product, which frees what earlier products used and waits for what this one uses. */
struct fetch {
    llmaas_stream *      stream;
    size_t               index; /* in the plan */
    size_t               first; /* first use that stays in memory until then */
    struct ggml_tensor * weight;
};

static void fetch(void * arg, int ith, int nth) {
    const struct fetch * f      = arg;
    llmaas_stream *      stream = f->stream;
    (void) nth;
    if (ith != 0) {
        return;
    }
    while (stream->n_used < f->first) {
        release(stream, load_at(stream, 0));
    }
    const uint64_t started = llmaas_now_ns();
    pump(stream); /* this may wait, too: a device takes only so many reads at a time */
    const size_t i = f->index - stream->n_used;
    load *       l = load_at(stream, i);
    if (i >= stream->n_loads || !await(stream, l)) {
        llmaas_graph_fail(stream->graph);
    }
    stream->n_fetched = f->index + 1;
    stream->stats.stalled_ns += llmaas_now_ns() - started;
    f->weight->data = bytes_of(stream, l);
}

void llmaas_stream_note(llmaas_stream * stream, llmaas_piece * piece, const llmaas_stretch * stretch) {
    note(stream, piece, stretch->n_bytes / stretch->stride * stretch->width);
}

bool llmaas_stream_use(
    llmaas_stream * stream, llmaas_piece * piece, const llmaas_stretch * stretch, struct ggml_tensor * weight, size_t n_before) {
    use * plan = llmaas_grown(stream->plan, stream->n_plan, &stream->plan_capacity, sizeof *plan);
    if (!plan) {
        return false;
    }
    stream->plan = plan;
    if (piece->turn < 0) { /* multiples of the golden ratio are evenly spread, however many there are */
        piece->turn      = fmod((double) ++stream->n_turns * 0.6180339887498949, 1);
        stream->is_stale = true;
    }
    llmaas_stream_note(stream, piece, stretch);
    const struct fetch arg = {stream, stream->n_plan, stream->n_plan - n_before, weight};
    stream->plan[stream->n_plan++] = (use) {piece, *stretch};
    size_t n_together = 0, n_room = room_for(piece, piece->n_bytes);
    for (size_t i = arg.first; i < stream->n_plan; i++) {
        n_together += room_for(stream->plan[i].piece, stream->plan[i].piece->n_bytes);
    }
    stream->n_widest   = n_room > stream->n_widest ? n_room : stream->n_widest;
    stream->n_together = n_together > stream->n_together ? n_together : stream->n_together;
    return llmaas_graph_step(stream->graph, fetch, &arg, sizeof arg);
}

/* Make the arena large enough for what is used together plus one of the largest pieces, which is read meanwhile. Where
 * several pieces are used together, add another one for the loss at the ring's end. */
static bool make_arena(llmaas_stream * stream) {
    const size_t n_end    = stream->n_together > stream->n_widest ? stream->n_widest : 0;
    const size_t n_wanted = stream->n_together + stream->n_widest + n_end;
    const size_t n_least  = n_wanted > stream->n_arena_min ? n_wanted : stream->n_arena_min;
    const size_t n_bytes = (n_least + LLMAAS_IO_HUGE_PAGE - 1) / LLMAAS_IO_HUGE_PAGE * LLMAAS_IO_HUGE_PAGE;
    if (n_bytes == stream->n_arena) {
        return true;
    }
    cut_loads(stream, 0);
    char * arena = llmaas_io_memory(n_bytes);
    if (!arena) {
        return false;
    }
    llmaas_io_register(stream->io, arena, n_bytes);
    llmaas_io_memory_free(stream->arena, stream->n_arena);
    stream->arena   = arena;
    stream->n_arena = n_bytes;
    return true;
}

/* Free the arena; the next graph makes another one. */
static void drop_arena(llmaas_stream * stream) {
    cut_loads(stream, 0);
    llmaas_io_register(stream->io, NULL, 0);
    llmaas_io_memory_free(stream->arena, stream->n_arena);
    stream->arena   = NULL;
    stream->n_arena = 0;
}

/* Set the limits, and give back excess memory at once: other models, or the app, may need it before this one's next
 * graph. The lock is held while a graph is computed, so no product needs that memory. In a child where the stream is
 * void, do nothing: the memory is mostly shared with the parent. */
static void set_memory(llmaas_stream * stream, uint64_t n_kept, uint64_t n_arena) {
    if (stream->lock.is_void) {
        return;
    }
    stream->n_kept_set = stream->n_kept_max = n_kept;
    stream->n_more      = 0;
    stream->n_arena_min = n_arena;
    if (stream->channels) {
        llmaas_channels_set_ahead(stream->channels, n_arena);
    }
    adapt(stream);
    if (n_arena == 0) {
        drop_arena(stream);
    }
}

void llmaas_stream_set_memory(llmaas_stream * stream, uint64_t n_kept, uint64_t n_arena) {
    pthread_mutex_lock(&stream->lock.mutex);
    set_memory(stream, n_kept, n_arena);
    pthread_mutex_unlock(&stream->lock.mutex);
}

bool llmaas_stream_try_set_memory(llmaas_stream * stream, uint64_t n_kept, uint64_t n_arena) {
    if (pthread_mutex_trylock(&stream->lock.mutex) != 0) {
        return false;
    }
    set_memory(stream, n_kept, n_arena);
    pthread_mutex_unlock(&stream->lock.mutex);
    return true;
}

/* Return whether a load has all that a use reads. */
static bool has(const load * l, const use * u) {
    const bool is_same = l->of.of.stride == u->of.stride && l->of.of.width == u->of.width;
    return l->of.piece == u->piece && l->of.of.n_bytes >= u->of.n_bytes && (is_same || l->of.of.width == l->of.of.stride);
}

/* Return how many of the first loads match the plan. */
static size_t n_foreseen(llmaas_stream * stream) {
    size_t i = 0;
    while (i < stream->n_loads && i < stream->n_plan && has(load_at(stream, i), &stream->plan[i])) {
        i++;
    }
    return i;
}

bool llmaas_stream_start(llmaas_stream * stream) {
    if (stream->n_plan == 0) {
        return true;
    }
    if (!make_arena(stream)) {
        return false;
    }
    if (stream->is_stale) { /* is_stale stays set: pieces no longer wanted are still part of this graph */
        choose_wanted(stream);
    }
    for (size_t i = 0; i < stream->n_plan; i++) {
        stream->plan[i] = read_for(&stream->plan[i]);
    }
    cut_loads(stream, n_foreseen(stream));
    stream->n_used = stream->n_ahead = stream->n_fetched = 0;
    stream->n_loaded = stream->n_loads;
    pump(stream);
    return true;
}

void llmaas_stream_end(llmaas_stream * stream) {
    const bool is_whole = stream->n_fetched == stream->n_plan && !llmaas_graph_failed(stream->graph);
    if (stream->n_plan > 0 && is_whole) {
        while (stream->n_used < stream->n_plan) {
            release(stream, load_at(stream, 0));
        }
        pump(stream);
    } else if (stream->n_plan > 0) { /* the graph was aborted, or a read failed */
        cut_loads(stream, 0);
    }
    if (stream->experts) {
        llmaas_experts_end(stream->experts);
    }
    if (stream->channels) {
        llmaas_channels_end(stream->channels);
    }
    stream->graph             = NULL;
    stream->lock.is_computing = false;
    pthread_mutex_unlock(&stream->lock.mutex);
}
