/* Attention over only those cells that some query of the graph can see. */
#ifndef LLMAAS_NARROW_H
#define LLMAAS_NARROW_H

#include "base/graph.h"

enum { LLMAAS_MAX_MASKS = 4, LLMAAS_MAX_RUNS = 16 };

typedef struct llmaas_run {
    int64_t first, n;
} llmaas_run;

/* The cells that the queries of a mask see. */
typedef struct llmaas_visible {
    const struct ggml_tensor * mask;
    int64_t first, n;  /* cells first..first+n-1 include all visible cells */
    bool    is_narrow; /* the range is worth using */
    bool    has_holes; /* there is one query, and many cells of the range are hidden from it */

    llmaas_run runs[LLMAAS_MAX_RUNS]; /* visible runs, to use instead of the range without FLASH_ATTN_EXT */
    int        n_runs;                /* 0: the range is as good */
} llmaas_visible;

typedef struct llmaas_narrow {
    llmaas_visible visible[LLMAAS_MAX_MASKS]; /* a model with sliding windows has two masks */
    int         n_visible;
} llmaas_narrow;

/* Read the masks of a graph whose inputs are set. Return false if nothing is worth changing. */
bool llmaas_narrow_read(llmaas_narrow * narrow, const struct ggml_cgraph * graph);
/* Forget the masks: nothing is narrowed. */
void llmaas_narrow_forget(llmaas_narrow * narrow);

/* Return the replacement of a FLASH_ATTN_EXT node; NULL to keep the node. */
struct ggml_tensor * llmaas_narrow_flash(
    const llmaas_narrow * narrow, llmaas_graph * graph, const struct ggml_tensor * node);

/* Attention without FLASH_ATTN_EXT is three consecutive nodes: scores, probabilities and result. Return what is visible if
 * nodes[i] is the first of three that should change; else NULL. */
const llmaas_visible * llmaas_narrow_attention(
    const llmaas_narrow * narrow, const struct ggml_cgraph * original, int i);

/* Make the replacements of the three nodes for a range. False if out of memory, and the graph fails. */
typedef struct llmaas_narrow_nodes {
    struct ggml_tensor *scores, *probabilities, *result;
} llmaas_narrow_nodes;

bool llmaas_narrow_products(
    const llmaas_visible * visible, llmaas_graph * graph, struct ggml_tensor * const * from, llmaas_narrow_nodes * nodes);

/* Append the replacement of the scores, or of the result, for several runs. The probabilities stay unchanged. */
void llmaas_runs_scores(const llmaas_visible * visible, llmaas_graph * graph, const struct ggml_tensor * scores);
void llmaas_runs_result(const llmaas_visible * visible, llmaas_graph * graph, const struct ggml_tensor * result);

/* -- masks (narrow_mask.c) ----------------------------------------------------------------------------------------- */

/* Return whether the mask's values are set before the graph is computed, and one mask serves all heads and streams. */
bool        llmaas_mask_is_readable(const struct ggml_tensor * mask);
llmaas_visible llmaas_mask_read(const struct ggml_tensor * mask);
void        llmaas_mask_find_runs(llmaas_visible * visible);

#endif
