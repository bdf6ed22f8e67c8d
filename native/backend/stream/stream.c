#include "stream/stream.h"

#include "base/fork_lock.h"
#include "stream/memory_budget.h"

#include <stdlib.h>

struct llmaas_stream {
    llmaas_fork_lock     lock; /* held while a graph is computed; guards the members below */
    llmaas_reading       reading;
    uint64_t             n_arena; /* bytes of the arena, as set */
    llmaas_arena *       arena;
    llmaas_memory_budget budget; /* has the pieces, experts and channels */
    bool                 is_stale; /* the budget changed and must be applied */
    uint64_t             n_passes; /* graphs that were begun */
};

/* -- creation and destruction ------------------------------------------------------------------------------------ */

llmaas_stream * llmaas_stream_new(void) {
    llmaas_stream * stream = calloc(1, sizeof *stream);
    if (!stream || !llmaas_fork_lock_init(&stream->lock, NULL)) {
        free(stream);
        return NULL;
    }
    stream->reading.n_gap = -1;
    stream->arena         = llmaas_arena_new(&stream->reading);
    stream->budget.pieces = stream->arena ? llmaas_pieces_new(stream->arena) : NULL;
    if (!stream->budget.pieces) {
        llmaas_stream_free(stream);
        return NULL;
    }
    return stream;
}

void llmaas_stream_free(llmaas_stream * stream) {
    if (!stream) {
        return;
    }
    llmaas_arena_free(stream->arena);
    llmaas_experts_free(stream->budget.experts);
    llmaas_channels_free(stream->budget.channels);
    llmaas_pieces_free(stream->budget.pieces);
    llmaas_fork_lock_destroy(&stream->lock);
    free(stream);
}

llmaas_pieces * llmaas_stream_pieces(llmaas_stream * stream) { return stream->budget.pieces; }

llmaas_experts * llmaas_stream_experts(llmaas_stream * stream) {
    llmaas_memory_budget * b = &stream->budget;
    return b->experts = b->experts ? b->experts : llmaas_experts_new(&stream->reading);
}

llmaas_channels * llmaas_stream_channels(llmaas_stream * stream) {
    llmaas_memory_budget * b = &stream->budget;
    return b->channels = b->channels ? b->channels : llmaas_channels_new(b->pieces, &stream->reading, stream->n_arena);
}

void llmaas_stream_spare(llmaas_stream * stream, llmaas_piece * piece) {
    pthread_mutex_lock(&stream->lock.mutex);
    llmaas_pieces_spare(stream->budget.pieces, piece);
    pthread_mutex_unlock(&stream->lock.mutex);
}

void llmaas_stream_keep_first(llmaas_stream * stream, llmaas_piece * piece, const llmaas_strided * first) {
    pthread_mutex_lock(&stream->lock.mutex);
    if (!stream->lock.is_void) {
        llmaas_pieces_keep_first(stream->budget.pieces, piece, first);
    }
    pthread_mutex_unlock(&stream->lock.mutex);
}

/* -- settings and statistics ------------------------------------------------------------------------------------- */

static bool set_reading(llmaas_stream * stream, const llmaas_reading * reading) {
    const llmaas_memory_budget * b = &stream->budget;
    stream->reading                = *reading;
    return llmaas_arena_set_reading(stream->arena, reading) &&
           (!b->experts || llmaas_experts_set_reading(b->experts, reading)) &&
           (!b->channels || llmaas_channels_set_reading(b->channels, reading));
}

bool llmaas_stream_set_reading(llmaas_stream * stream, const llmaas_reading * reading) {
    pthread_mutex_lock(&stream->lock.mutex);
    const bool ok = stream->lock.is_void || set_reading(stream, reading);
    pthread_mutex_unlock(&stream->lock.mutex);
    return ok;
}

/* Set the limits, and give back excess memory at once: other models, or the app, may need it before this one's next
 * graph. The lock is held while a graph is computed, so no product needs that memory. In a child where the stream is
 * void, do nothing: the memory is mostly shared with the parent. */
static void set_memory(llmaas_stream * stream, uint64_t n_kept, uint64_t n_arena) {
    if (stream->lock.is_void) {
        return;
    }
    stream->n_arena = n_arena;
    if (stream->budget.channels) {
        llmaas_channels_set_ahead(stream->budget.channels, n_arena);
    }
    llmaas_memory_budget_set(&stream->budget, n_kept);
    llmaas_memory_budget_apply(&stream->budget);
    llmaas_arena_set_least(stream->arena, n_arena);
    stream->is_stale = false;
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

static void add_experts(llmaas_stream_stats * stats, const llmaas_expert_stats * experts) {
    stats->n_bytes += experts->n_bytes;
    stats->n_kept += experts->n_kept;
    stats->n_read += experts->n_read;
    stats->stalled_ns += experts->stalled_ns;
    stats->n_least  = experts->n_least;
    stats->n_hits   = experts->n_hits;
    stats->n_misses = experts->n_misses;
}

static void add_channels(llmaas_stream_stats * stats, const llmaas_channel_stats * channels) {
    stats->n_bytes += channels->n_bytes;
    stats->n_kept += channels->n_kept;
    stats->n_read += channels->n_read;
    stats->n_wasted += channels->n_wasted;
    stats->stalled_ns += channels->stalled_ns;
    stats->n_operands         = channels->n_operands;
    stats->n_passing          = channels->n_passing;
    stats->n_channel_hits     = channels->n_hits;
    stats->n_channel_misses   = channels->n_misses;
    stats->n_channel_preloads = channels->n_preloads;
}

void llmaas_stream_read_stats(llmaas_stream * stream, llmaas_stream_stats * stats) {
    pthread_mutex_lock(&stream->lock.mutex);
    const llmaas_piece_stats pieces = llmaas_pieces_read_stats(stream->budget.pieces);
    const llmaas_arena_stats arena  = llmaas_arena_read_stats(stream->arena);
    *stats = (llmaas_stream_stats) {
        .n_bytes = pieces.n_bytes, .n_kept = pieces.n_kept, .n_arena = arena.n_bytes, .n_read = arena.n_read,
        .n_wasted = arena.n_wasted, .stalled_ns = arena.stalled_ns, .n_first = pieces.n_first,
        .n_room = llmaas_memory_budget_of_pieces(&stream->budget).n_bytes, .n_first_kept = pieces.n_first_kept,
        .n_passes = stream->n_passes, .n_spare = pieces.n_spare, .n_spare_kept = pieces.n_spare_kept,
        .n_spare_used = pieces.n_spare_used};
    if (stream->budget.experts) {
        const llmaas_expert_stats experts = llmaas_experts_read_stats(stream->budget.experts);
        add_experts(stats, &experts);
    }
    if (stream->budget.channels) {
        const llmaas_channel_stats channels = llmaas_channels_read_stats(stream->budget.channels);
        add_channels(stats, &channels);
    }
    pthread_mutex_unlock(&stream->lock.mutex);
}

/* -- computing a graph ------------------------------------------------------------------------------------------- */

bool llmaas_stream_begin(llmaas_stream * stream, llmaas_graph * graph, int64_t n_more) {
    pthread_mutex_lock(&stream->lock.mutex);
    if (stream->lock.is_void) {
        pthread_mutex_unlock(&stream->lock.mutex);
        return false;
    }
    stream->lock.is_computing = true;
    stream->n_passes++;
    if (n_more != 0) {
        llmaas_memory_budget_reduce(&stream->budget, n_more);
        stream->is_stale = true;
    }
    llmaas_arena_begin(stream->arena, graph);
    llmaas_pieces_age(stream->budget.pieces);
    if (stream->is_stale || llmaas_pieces_are_stale(stream->budget.pieces)) {
        llmaas_memory_budget_apply(&stream->budget);
        stream->is_stale = false;
    }
    if (stream->budget.experts) {
        llmaas_experts_begin(stream->budget.experts, graph);
    }
    if (stream->budget.channels) {
        llmaas_channels_begin(stream->budget.channels, graph);
    }
    return true;
}

/* Choose again if need be. The choice stays stale: pieces that are no longer wanted are still part of this graph. */
bool llmaas_stream_start(llmaas_stream * stream) {
    if (llmaas_pieces_are_stale(stream->budget.pieces)) {
        const llmaas_piece_room room = llmaas_memory_budget_of_pieces(&stream->budget);
        llmaas_pieces_choose(stream->budget.pieces, &room);
    }
    return llmaas_arena_start(stream->arena);
}

void llmaas_stream_end(llmaas_stream * stream) {
    llmaas_arena_end(stream->arena);
    if (stream->budget.experts) {
        llmaas_experts_end(stream->budget.experts);
    }
    if (stream->budget.channels) {
        llmaas_channels_end(stream->budget.channels);
    }
    stream->lock.is_computing = false;
    pthread_mutex_unlock(&stream->lock.mutex);
}
