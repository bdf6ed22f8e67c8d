/* Weights in a file, of which memory holds a part: some pieces, experts and channels are kept; the others are read for
 * each graph, ahead of their use where it is foreseen. */
#ifndef LLMAAS_STREAM_H
#define LLMAAS_STREAM_H

#include "stream/channels.h"
#include "stream/experts.h"
#include "stream/pieces.h"

typedef struct llmaas_stream llmaas_stream;

llmaas_stream * llmaas_stream_new(void);
void            llmaas_stream_free(llmaas_stream * stream);

/* Return the stream's pieces; the experts or channels that share memory with them are created if needed, NULL if out of
 * memory. */
llmaas_pieces *   llmaas_stream_pieces(llmaas_stream * stream);
llmaas_experts *  llmaas_stream_experts(llmaas_stream * stream);
llmaas_channels * llmaas_stream_channels(llmaas_stream * stream);
/* Make a piece a spare one (pieces.h), from the next graph on. */
void llmaas_stream_spare(llmaas_stream * stream, llmaas_piece * piece);

/* Keep these bytes of a piece before all others (pieces.h). Waits for the graph being computed. */
void llmaas_stream_keep_first(llmaas_stream * stream, llmaas_piece * piece, const llmaas_strided * first);

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
/* Start reading: all uses of pieces are known, and the graph is computed next. False if out of memory. */
bool llmaas_stream_start(llmaas_stream * stream);
void llmaas_stream_end(llmaas_stream * stream);

#endif
