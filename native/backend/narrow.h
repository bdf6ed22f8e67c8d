/* Attention over those cells only that some query of the graph can see. */
#ifndef LLMAAS_NARROW_H
#define LLMAAS_NARROW_H

#include "graph.h"

enum { LLMAAS_MAX_MASKS = 4, LLMAAS_MAX_RUNS = 16 };

typedef struct llmaas_run {
    int64_t first, n;
} llmaas_run;

/* What the queries of a mask see. */
typedef struct llmaas_seen {
    const struct ggml_tensor * mask;
    int64_t first, n;  /* attention over cells first..first+n-1 is attention over all */
    bool    is_narrow; /* it is worth it */
    bool    has_holes; /* there is one query, and many of these cells are hidden from it all the same */

    llmaas_run runs[LLMAAS_MAX_RUNS]; /* instead of them, without FLASH_ATTN_EXT */
    int        n_runs;                /* 0: the range is as good */
} llmaas_seen;

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

/* Attention without FLASH_ATTN_EXT is three nodes in a row: scores, probabilities, and the result. What is seen, if
 * nodes[i] is the first of them; NULL: it is not, or they remain as they are. */
const llmaas_seen * llmaas_narrow_attention(
    const llmaas_narrow * narrow, const struct ggml_cgraph * original, int i);

/* What stands for the three nodes where a range is seen. False: out of memory, and the graph fails. */
typedef struct llmaas_narrow_nodes {
    struct ggml_tensor *scores, *probabilities, *result;
} llmaas_narrow_nodes;

bool llmaas_narrow_products(
    const llmaas_seen * seen, llmaas_graph * graph, struct ggml_tensor * const * from, llmaas_narrow_nodes * nodes);

/* Where several runs are seen: append what stands for the scores, and for the result. Probabilities stay. */
void llmaas_runs_scores(const llmaas_seen * seen, llmaas_graph * graph, const struct ggml_tensor * scores);
void llmaas_runs_result(const llmaas_seen * seen, llmaas_graph * graph, const struct ggml_tensor * result);

/* -- masks (narrow_mask.c) ----------------------------------------------------------------------------------------- */

/* Whether the values are there before the graph is computed, and one mask is for all heads and streams. */
bool        llmaas_mask_is_readable(const struct ggml_tensor * mask);
llmaas_seen llmaas_mask_read(const struct ggml_tensor * mask);
void        llmaas_mask_find_runs(llmaas_seen * seen);

/* Cells first..first+n-1 of an operand that has cells along `axis`; NULL: out of memory, and the graph fails. */
struct ggml_tensor * llmaas_cut(
    llmaas_graph * graph, const struct ggml_tensor * tensor, int axis, int64_t first, int64_t n);

#endif
