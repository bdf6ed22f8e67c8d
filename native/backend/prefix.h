/* Prefixes. Where rows of a weight are left out, everything that depends on them is left out too, up to the product
 * that has no columns for it. Examples: heads between the query matrix and the attention's output; neurons between
 * ffn_gate and ffn_down. */
#ifndef LLMAAS_PREFIX_H
#define LLMAAS_PREFIX_H

#include "graph.h"
#include "weights.h"

/* The part of a tensor that is computed: the first n of every `period` neighbors along an axis. */
typedef struct llmaas_prefix {
    const struct ggml_tensor * of;
    int                        axis;
    int64_t                    period; /* the length of the axis, or a divisor of it */
    int64_t                    n;
    struct ggml_tensor *       narrowed; /* has only these values, without gaps; NULL until it is made */
    int32_t                    n_unread; /* uses of the tensor as an operand that were not seen yet */
    size_t                     joined;   /* number of another prefix of the same set: either all of a set hold, or
                                          * none */
    bool                       is_void;  /* some node needs more than the prefix; only valid where `joined` is the
                                          * prefix's own number */
} llmaas_prefix;

typedef struct llmaas_prefixes {
    llmaas_prefix * all;
    size_t          n, n_capacity;
    uint32_t *      slots; /* open addressing by tensor: number + 1, or 0 */
    size_t          n_slots;
    int64_t         n_unread; /* sum over all */
} llmaas_prefixes;

void llmaas_prefixes_free(llmaas_prefixes * prefixes);

/* Find the prefixes of a graph, or of a part of one, at a level. False if out of memory. */
bool llmaas_prefixes_find(
    llmaas_prefixes * prefixes, const llmaas_weights * weights, int32_t level, const struct ggml_cgraph * graph);
/* Remove all prefixes. */
void llmaas_prefixes_forget(llmaas_prefixes * prefixes);

/* Return the prefix of `tensor`; NULL if all of it is computed. */
llmaas_prefix * llmaas_prefixes_of(const llmaas_prefixes * prefixes, const struct ggml_tensor * tensor);

/* Make the replacement of the node of a prefix with n > 0; do not append it. Call in the graph's order. NULL if out of
 * memory, and the graph fails. */
struct ggml_tensor * llmaas_prefix_make(
    const llmaas_prefixes * prefixes, llmaas_graph * graph, llmaas_prefix * prefix);

/* -- how nodes pass prefixes on (prefix_rules.c)
 * -------------------------------------------------------------------- */

/* Find the prefix of a node that reads the tensor of `from`, and perhaps other tensors with prefixes. False if the node
 * needs more of it, or is of an unknown kind. */
bool llmaas_prefix_follow(
    const llmaas_prefixes * prefixes, const struct ggml_tensor * node, const llmaas_prefix * from, llmaas_prefix * to);

/* Return how many neighbors of operand i, along *axis, the narrowed node reads; 0: the operand as a whole. The operand
 * has no prefix. */
int64_t llmaas_prefix_cut(const struct ggml_tensor * node, int i, const llmaas_prefix * of_node, int * axis);

#endif
