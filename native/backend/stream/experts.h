/* The experts of mixtures, in a file. Which experts a product needs is known only after the router has chosen, so they
 * cannot be read earlier. A cache of slots keeps the experts that were used most often of late; products get slot
 * numbers in place of expert numbers. */
#ifndef LLMAAS_EXPERTS_H
#define LLMAAS_EXPERTS_H

#include "base/graph.h"
#include "llmaas/engine.h"

#include <stdbool.h>

typedef struct llmaas_experts llmaas_experts;
typedef struct llmaas_stack   llmaas_stack; /* a weight's experts */

typedef struct llmaas_expert_stats {
    uint64_t n_bytes;  /* bytes of all experts */
    uint64_t n_least;  /* bytes of the slots that one product may need at a time */
    uint64_t n_kept;   /* bytes of slots that hold memory */
    uint64_t n_read;   /* bytes read so far */
    uint64_t n_hits, n_misses;
    uint64_t stalled_ns;
} llmaas_expert_stats;

llmaas_experts * llmaas_experts_new(const llmaas_reading * reading);
void             llmaas_experts_free(llmaas_experts * experts);

/* Add n_experts that are contiguous from `offset` of fd on, n_bytes each, a multiple of 4 KiB. Call before the first
 * graph; the stack lives as long as `experts`. NULL for another size or offset, or if out of memory. */
llmaas_stack * llmaas_experts_add(llmaas_experts * experts, int fd, uint64_t offset, size_t n_bytes, int32_t n_experts);

/* Set how experts are read; not while a graph is computed. False if out of memory. */
bool llmaas_experts_set_reading(llmaas_experts * experts, const llmaas_reading * reading);
/* Set the bytes of slots, at least what one product may need; not while a graph is computed. */
void                llmaas_experts_set_memory(llmaas_experts * experts, uint64_t n_bytes);
llmaas_expert_stats llmaas_experts_read_stats(const llmaas_experts * experts);

/* Begin a graph. */
void llmaas_experts_begin(llmaas_experts * experts, llmaas_graph * graph);
/* Make `product` (MUL_MAT_ID, a copy of the graph's) use the experts of `stack`: append a step that reads them, and
 * replace its weight and ids by the slots and their numbers. False if out of memory. */
bool llmaas_experts_use(llmaas_experts * experts, llmaas_stack * stack, struct ggml_tensor * product);
void llmaas_experts_end(llmaas_experts * experts);

#endif
