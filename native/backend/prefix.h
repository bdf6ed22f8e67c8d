/* Where rows of a weight are left out, what depends on them is left out, too, up to the product that has no columns for it:
 * heads between the queries' matrix and the attention's output, neurons between ffn_gate and ffn_down. */
#ifndef LLMAAS_PREFIX_H
#define LLMAAS_PREFIX_H

#include "graph.h"
#include "weights.h"

/* The part of a tensor that is computed: of each `period` neighbours along an axis, the first n. */
typedef struct llmaas_prefix {
    const struct ggml_tensor * of;
    int                        axis;
    int64_t                    period; /* all along the axis, or a divisor of that */
    int64_t                    n;
    struct ggml_tensor *       narrowed; /* has these values only, without gaps; NULL until it is made */
    int32_t                    n_unread; /* operands that it is and that were not seen yet */
    size_t                     joined;   /* with the prefix of this number: they hold together, or not at all */
    bool                       is_void;  /* somebody reads more; counts where joined is its own number */
} llmaas_prefix;

typedef struct llmaas_prefixes {
    llmaas_prefix * all;
    size_t          n, n_capacity;
    uint32_t *      slots; /* open addressing by tensor: number + 1, or 0 */
    size_t          n_slots;
    int64_t         n_unread; /* of all */
} llmaas_prefixes;

void llmaas_prefixes_free(llmaas_prefixes * prefixes);

/* Find those of a graph, or of a part of one, at a level. False: out of memory. */
bool llmaas_prefixes_find(
    llmaas_prefixes * prefixes, const llmaas_weights * weights, int32_t level, const struct ggml_cgraph * graph);
/* There are none. */
void llmaas_prefixes_forget(llmaas_prefixes * prefixes);

/* That of `tensor`; NULL: all of it is computed. */
llmaas_prefix * llmaas_prefixes_of(const llmaas_prefixes * prefixes, const struct ggml_tensor * tensor);

/* What stands for the node of a prefix whose n is not 0, not appended yet; in the graph's order. NULL: out of memory, and
 * the graph fails. */
struct ggml_tensor * llmaas_prefix_make(
    const llmaas_prefixes * prefixes, llmaas_graph * graph, llmaas_prefix * prefix);

/* -- what nodes make of prefixes (prefix_rules.c) ------------------------------------------------------------------ */

/* The prefix of a node that reads the tensor of `from`, and perhaps others with a prefix. False: it needs more, or nobody
 * knows what it does. */
bool llmaas_prefix_follow(
    const llmaas_prefixes * prefixes, const struct ggml_tensor * node, const llmaas_prefix * from, llmaas_prefix * to);

/* How many of operand i's neighbours, along *axis, the narrowed node reads; 0: the operand as a whole. It has no prefix. */
int64_t llmaas_prefix_cut(const struct ggml_tensor * node, int i, const llmaas_prefix * of_node, int * axis);

#endif
