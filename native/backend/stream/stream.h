/* Weights in a file, of which memory holds a part: some pieces are kept; the others are read for each graph, ahead of
 * their use.
 *
 * Graphs use pieces in the same order again and again. So the order of the last graph is what is read ahead for the
 * next, even while nothing is computed. Kept pieces are spread evenly over that order: then neither reading nor
 * computing waits for the other at a long stretch of pieces of one kind. Pieces that recent graphs used in full are
 * kept first, then those used in part: what a level leaves out makes way for what it needs. */
#ifndef LLMAAS_STREAM_H
#define LLMAAS_STREAM_H

#include "base/graph.h"
#include "llmaas/engine.h"
#include "stream/channels.h"
#include "stream/experts.h"

#include <stdbool.h>

typedef struct llmaas_stream llmaas_stream;

#define LLMAAS_PIECE_BYTES (2 << 20) /* at most, unless something cannot be cut */

/* A run of a weight's rows, or of an operand's channels. */
typedef struct llmaas_piece {
    int      fd;
    uint64_t offset; /* of the piece's bytes in the file */
    size_t   n_bytes;
    char *   home; /* where it is when kept: its own address space, backed by memory only then */
    bool     is_kept;
    bool     is_wanted; /* to be kept, and so read in full */
    bool     is_passing; /* never kept: its channels are kept instead (channels.h) */
    double   turn;      /* pieces with the same use are kept in ascending order of this; negative: no graph has used the
                         * piece yet */
    size_t   n_now, n_lately; /* most bytes that a graph used: in the current interval of 32 graphs, and of late (last
                               * interval included) */
} llmaas_piece;

/* Bytes used of a piece: among the first n_bytes, the first `width` of every `stride`. A smaller width means that a
 * part leaves out columns. */
typedef struct llmaas_stretch {
    size_t n_bytes, stride, width;
} llmaas_stretch;

llmaas_stream * llmaas_stream_new(void);
void            llmaas_stream_free(llmaas_stream * stream);

/* Add a piece, which lives as long as the stream. NULL if out of memory. */
llmaas_piece * llmaas_stream_add(llmaas_stream * stream, const llmaas_piece * piece);

/* Return the experts that share the stream's memory; create them if needed. NULL if out of memory. */
llmaas_experts * llmaas_stream_experts(llmaas_stream * stream);

/* Return the channels that share the stream's memory; create them if needed. NULL if out of memory. */
llmaas_channels * llmaas_stream_channels(llmaas_stream * stream);
/* Stop keeping a piece: from the next graph on, it is only read for graphs that use it in full. */
void llmaas_stream_pass(llmaas_stream * stream, llmaas_piece * piece);

/* Set the bytes of pieces, experts and channels that may be kept, and of the arena that the others are read into.
 * Excess memory is given back before the call returns, once the graph being computed is done. With n_arena 0 the arena
 * is also given back, until the next graph. */
void llmaas_stream_set_memory(llmaas_stream * stream, uint64_t n_kept, uint64_t n_arena);
/* Do the same unless a graph is being computed; then change nothing and return false. */
bool llmaas_stream_try_set_memory(llmaas_stream * stream, uint64_t n_kept, uint64_t n_arena);
/* Set how pieces, experts and channels are read, from the next graph on. False if out of memory; the setting then
 * applies to some of them only. */
bool llmaas_stream_set_reading(llmaas_stream * stream, const llmaas_reading * reading);
void llmaas_stream_read_stats(llmaas_stream * stream, llmaas_stream_stats * stats);

/* Begin a graph: until its end, no other thread can use the stream. n_more: bytes by which other memory grows from now
 * on; less is kept by as much, until set_memory() is called again. False in a child whose parent had another thread
 * computing with the stream at the fork; the stream is void there. */
bool llmaas_stream_begin(llmaas_stream * stream, llmaas_graph * graph, int64_t n_more);
/* Note that the graph uses so much of `piece`, which is kept. */
void llmaas_stream_note(llmaas_stream * stream, llmaas_piece * piece, const llmaas_stretch * stretch);
/* Note that the graph next uses so much of `piece`, which is not kept, as the data of `weight`. The pieces of the
 * n_before calls before must be in memory at the same time. False if out of memory. */
bool llmaas_stream_use(
    llmaas_stream * stream, llmaas_piece * piece, const llmaas_stretch * stretch, struct ggml_tensor * weight, size_t n_before);
/* Start reading: all uses are known, and the graph is computed next. False if out of memory. */
bool llmaas_stream_start(llmaas_stream * stream);
void llmaas_stream_end(llmaas_stream * stream);

#endif
