/* The experts of mixtures, in a file. Which ones a product needs is known when the router has chosen, so they cannot be read
 * ahead of that: a cache keeps those that were used most often of late, in slots, and products are given the slots' numbers
 * for the experts'. */
#ifndef LLMAAS_EXPERTS_H
#define LLMAAS_EXPERTS_H

#include "graph.h"
#include "llmaas/engine.h"

#include <stdbool.h>

typedef struct llmaas_experts llmaas_experts;
typedef struct llmaas_stack   llmaas_stack; /* a weight's experts */

typedef struct llmaas_expert_stats {
    uint64_t n_bytes;  /* of all experts */
    uint64_t n_least;  /* of the slots that a product may need at a time */
    uint64_t n_kept;   /* of slots that have memory */
    uint64_t n_read;   /* so far */
    uint64_t n_hits, n_misses;
    uint64_t stalled_ns;
} llmaas_expert_stats;

llmaas_experts * llmaas_experts_new(const llmaas_reading * reading);
void             llmaas_experts_free(llmaas_experts * experts);

/* n_experts that follow each other from `offset` of fd on, n_bytes each: a multiple of 4 KiB. Before the first graph; lives as
 * long as `experts`. NULL: another size, or memory. */
llmaas_stack * llmaas_experts_add(llmaas_experts * experts, int fd, uint64_t offset, size_t n_bytes, int32_t n_experts);

/* How they are read; outside of graphs. False: memory. */
bool llmaas_experts_set_reading(llmaas_experts * experts, const llmaas_reading * reading);
/* Bytes of slots, at least what a product may need; outside of graphs. */
void                llmaas_experts_set_memory(llmaas_experts * experts, uint64_t n_bytes);
llmaas_expert_stats llmaas_experts_read_stats(const llmaas_experts * experts);

/* Around a graph. */
void llmaas_experts_begin(llmaas_experts * experts, llmaas_graph * graph);
/* `product` (MUL_MAT_ID, a copy of the graph's) uses the experts of `stack` next: its weight and ids become those of slots, for
 * which a step is appended. False: memory. */
bool llmaas_experts_use(llmaas_experts * experts, llmaas_stack * stack, struct ggml_tensor * product);
void llmaas_experts_end(llmaas_experts * experts);

#endif
