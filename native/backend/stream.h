/* Weights in a file of which memory holds a part: pieces that are kept, and pieces that are read for each graph, ahead of
 * their use.
 *
 * Graphs use pieces in the same order again and again, so the order of the last graph is what is read ahead for the next,
 * also while nothing is computed. Kept pieces are spread evenly over that order: reading never waits for computing to
 * reach a stretch of others, nor the other way round. Pieces that graphs use as a whole of late come first, then those that
 * they use in part: what a level leaves out makes way for what it needs. */
#ifndef LLMAAS_STREAM_H
#define LLMAAS_STREAM_H

#include "channels.h"
#include "experts.h"
#include "graph.h"
#include "llmaas/engine.h"

#include <stdbool.h>

typedef struct llmaas_stream llmaas_stream;

#define LLMAAS_PIECE_BYTES (2 << 20) /* at most, unless something cannot be cut */

/* A run of a weight's rows, or of an operand's channels. */
typedef struct llmaas_piece {
    int      fd;
    uint64_t offset; /* of its bytes in the file */
    size_t   n_bytes;
    char *   home; /* where it is when it is kept: address space of its own, with memory under it only then */
    bool     is_kept;
    bool     is_wanted; /* it is to be kept, and read as a whole */
    bool     is_passing; /* it never is: its channels are, instead (channels.h) */
    double   turn;      /* pieces used alike are kept in rising order of it; below 0: no graph has used it yet */
    size_t   n_now, n_lately; /* bytes that graphs use of it at most: those of this age, and of late */
} llmaas_piece;

/* Of the first n_bytes, the first `width` of each `stride`: rows of which a part leaves out columns. */
typedef struct llmaas_stretch {
    size_t n_bytes, stride, width;
} llmaas_stretch;

llmaas_stream * llmaas_stream_new(void);
void            llmaas_stream_free(llmaas_stream * stream);

/* One piece more, which lives as long as the stream. NULL: memory. */
llmaas_piece * llmaas_stream_add(llmaas_stream * stream, const llmaas_piece * piece);

/* The experts whose memory is the stream's, too. NULL: memory. */
llmaas_experts * llmaas_stream_experts(llmaas_stream * stream);

/* The channels whose memory is the stream's, too. NULL: memory. */
llmaas_channels * llmaas_stream_channels(llmaas_stream * stream);
/* From the next graph on, a piece is only read for graphs that use it as a whole. */
void llmaas_stream_pass(llmaas_stream * stream, llmaas_piece * piece);

/* Bytes of pieces, experts and channels that may be kept, and of the ones that are read at a time. Memory beyond that is given
 * back before it returns, after the graph being computed; with n_arena 0 the arena's, too, until the next graph. */
void llmaas_stream_set_memory(llmaas_stream * stream, uint64_t n_kept, uint64_t n_arena);
/* The same, unless a graph is being computed: false then, and nothing was changed. */
bool llmaas_stream_try_set_memory(llmaas_stream * stream, uint64_t n_kept, uint64_t n_arena);
/* How pieces, experts and channels are read, from the next graph on. False: memory; some are, then. */
bool llmaas_stream_set_reading(llmaas_stream * stream, const llmaas_reading * reading);
void llmaas_stream_read_stats(llmaas_stream * stream, llmaas_stream_stats * stats);

/* Around a graph: from begin to end the stream is its own, and no other thread's. n_more: bytes by which other memory grows from
 * then on, which are taken from what may be kept until set_memory() tells anew. False: this is a child, and another thread of its
 * parent was computing with the stream; it is void. */
bool llmaas_stream_begin(llmaas_stream * stream, llmaas_graph * graph, int64_t n_more);
/* The graph uses so much of `piece`, which is kept. */
void llmaas_stream_note(llmaas_stream * stream, llmaas_piece * piece, const llmaas_stretch * stretch);
/* The graph uses so much of `piece` next, which is not kept, as the data of `weight`, together with those that it used in the
 * n_before calls before. False: memory. */
bool llmaas_stream_use(
    llmaas_stream * stream, llmaas_piece * piece, const llmaas_stretch * stretch, struct ggml_tensor * weight, size_t n_before);
/* All uses are known; the graph is computed next. False: memory. */
bool llmaas_stream_start(llmaas_stream * stream);
void llmaas_stream_end(llmaas_stream * stream);

#endif
