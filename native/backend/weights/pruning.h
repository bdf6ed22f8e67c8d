/* Structured pruning. Where rows of a weight are left out, everything that depends on them is left out too, up to the product
 * that has no columns for it. Examples: heads between the query matrix and the attention's output; neurons between
 * ffn_gate and ffn_down. */
#ifndef LLMAAS_PRUNING_H
#define LLMAAS_PRUNING_H

#include "base/graph.h"
#include "weights/weights.h"

/* The part of a tensor that is computed: the first n of every `period` neighbors along an axis. */
typedef struct llmaas_pruned {
    const struct ggml_tensor * of;
    int                        axis;
    int64_t                    period; /* the length of the axis, or a divisor of it */
    int64_t                    n;
    struct ggml_tensor *       narrowed; /* has only these values, without gaps; NULL until it is made */
    int32_t                    n_unread; /* uses of the tensor as an operand that were not seen yet */
    size_t                     joined;   /* number of another tensor of the same set: either all of a set hold, or
                                          * none */
    bool                       is_void;  /* some node needs more than that; only valid where `joined` is the
                                          * tensor's own number */
    bool                       has_rest; /* where all of the tensor is computed, the other values may differ from
                                          * zero */
} llmaas_pruned;

typedef struct llmaas_pruning {
    llmaas_pruned * all;
    size_t          n, n_capacity;
    uint32_t *      slots; /* open addressing by tensor: number + 1, or 0 */
    size_t          n_slots;
    int64_t         n_unread; /* sum over all */
} llmaas_pruning;

void llmaas_pruning_free(llmaas_pruning * pruning);

/* Find the pruned tensors of a graph, or of a part of one, at a level. False if out of memory. */
bool llmaas_pruning_find(
    llmaas_pruning * pruning, const llmaas_weights * weights, int32_t level, const struct ggml_cgraph * graph);
/* Forget all pruned tensors. */
void llmaas_pruning_forget(llmaas_pruning * pruning);

/* Return what is computed of `tensor`; NULL if all of it is computed. */
llmaas_pruned * llmaas_pruning_of(const llmaas_pruning * pruning, const struct ggml_tensor * tensor);

/* Make the replacement of a pruned node with n > 0; do not append it. Call in the graph's order. NULL if out of
 * memory, and the graph fails. */
struct ggml_tensor * llmaas_pruned_make(
    const llmaas_pruning * pruning, llmaas_graph * graph, llmaas_pruned * pruned);

/* Append a step that sets the values of `tensor` that a narrowed model does not have to zero, unless they are zero. Call
 * it before a node that writes the tensor to memory which outlives the graph. */
void llmaas_pruning_clear_rest(
    const llmaas_pruning * pruning, llmaas_graph * graph, const struct ggml_tensor * tensor);

/* -- how nodes pass the pruning on (pruning_rules.c) ---------------------------------------------------------------- */

/* Find what is computed of a node that reads the tensor of `from`, and perhaps other pruned tensors. False if the node
 * needs more of it, or is of an unknown kind. */
bool llmaas_pruned_follow(
    const llmaas_pruning * pruning, const struct ggml_tensor * node, const llmaas_pruned * from, llmaas_pruned * to);

/* Return how many neighbors of operand i, along *axis, the narrowed node reads; 0: the operand as a whole. The operand
 * is not pruned. */
int64_t llmaas_pruned_cut(const struct ggml_tensor * node, int i, const llmaas_pruned * of_node, int * axis);

#endif
