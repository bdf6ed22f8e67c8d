/* The arena: a ring of memory into which pieces that are not kept are read, ahead of their use.
 *
 * Graphs use pieces in the same order again and again. So the order of the last graph is what is read ahead for the
 * next, even while nothing is computed, or graphs that find everything in memory are. */
#ifndef LLMAAS_ARENA_H
#define LLMAAS_ARENA_H

#include "base/graph.h"
#include "llmaas/engine.h"
#include "stream/piece.h"

typedef struct llmaas_arena llmaas_arena;

typedef struct llmaas_arena_stats {
    uint64_t n_bytes;  /* bytes of the arena */
    uint64_t n_read;   /* bytes read so far */
    uint64_t n_wasted; /* bytes of n_read that were read ahead but not used */
    uint64_t stalled_ns;
} llmaas_arena_stats;

/* Create an arena, which gets memory with the first graph that needs it. NULL if out of memory. */
llmaas_arena *     llmaas_arena_new(const llmaas_reading * reading);
void               llmaas_arena_free(llmaas_arena * arena);
llmaas_arena_stats llmaas_arena_read_stats(const llmaas_arena * arena);

/* Set how pieces are read, from the next graph on. False if out of memory. */
bool llmaas_arena_set_reading(llmaas_arena * arena, const llmaas_reading * reading);
/* Set the least size of the arena, in bytes. With 0 its memory is given back, until the next graph. */
void llmaas_arena_set_least(llmaas_arena * arena, uint64_t n_bytes);

/* Begin a graph. */
void llmaas_arena_begin(llmaas_arena * arena, llmaas_graph * graph);
/* Note that the graph next uses so much of `piece`, which is not kept, as the data of `weight`. The pieces of the
 * n_before calls before must be in memory at the same time. False if out of memory. */
bool llmaas_arena_use(
    llmaas_arena * arena, llmaas_piece * piece, const llmaas_strided * used, struct ggml_tensor * weight, size_t n_before);
/* Start reading: all uses are known, and the graph is computed next. A piece that is wanted is kept once it is no longer
 * used. False if out of memory. */
bool llmaas_arena_start(llmaas_arena * arena);
void llmaas_arena_end(llmaas_arena * arena);

#endif
