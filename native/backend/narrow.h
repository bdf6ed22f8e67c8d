/* Attention over those cells only that some query of the graph can see, where others lie before or behind them. */
#ifndef LLMAAS_NARROW_H
#define LLMAAS_NARROW_H

#include "graph.h"

/* What the queries of a mask see. */
typedef struct llmaas_seen {
    const struct ggml_tensor * mask;
    int64_t first, n;  /* attention over cells first..first+n-1 is attention over all */
    bool    is_narrow; /* it is worth it */
    bool    has_holes; /* there is one query, and many of these cells are hidden from it all the same */
} llmaas_seen;

enum { LLMAAS_MAX_MASKS = 4 };

typedef struct llmaas_narrow {
    llmaas_seen seen[LLMAAS_MAX_MASKS]; /* a model with sliding windows has two masks */
    int         n_seen;
} llmaas_narrow;

/* Read the masks of a graph whose inputs are set. False: nothing of it is worth changing. */
bool llmaas_narrow_read(llmaas_narrow * narrow, const struct ggml_cgraph * graph);
/* Forget them: nothing is narrowed. */
void llmaas_narrow_forget(llmaas_narrow * narrow);

/* What stands for a FLASH_ATTN_EXT node; NULL: the node itself. */
struct ggml_tensor * llmaas_narrow_flash(
    const llmaas_narrow * narrow, llmaas_graph * graph, const struct ggml_tensor * node);

/* Attention without FLASH_ATTN_EXT is three nodes in a row. */
typedef struct llmaas_narrow_nodes {
    struct ggml_tensor *scores, *probabilities, *result;
    int64_t             first; /* the cell of the first score */
} llmaas_narrow_nodes;

/* What stands for the three nodes from nodes[i] on. False: they are not attention, or remain as they are. */
bool llmaas_narrow_products(const llmaas_narrow * narrow, llmaas_graph * graph, const struct ggml_cgraph * original,
                            int i, llmaas_narrow_nodes * nodes);

#endif
