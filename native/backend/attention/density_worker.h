/* One thread's contribution to the density of an attention node: probabilities, summed by KV cell. */
#ifndef LLMAAS_DENSITY_WORKER_H
#define LLMAAS_DENSITY_WORKER_H

#include "llmaas/tap.h"

/* An attention node, described alike for its two forms (with and without flash attention). */
typedef struct llmaas_attention {
    const llmaas_tap_view *    view;
    const struct ggml_tensor * mask; /* or NULL */
    bool                       is_flash;
    int64_t                    n_tokens;
    int64_t                    n_kv;
    int64_t                    first_cell; /* cell of column 0 */
    int64_t                    n_head;
    int64_t                    n_head_kv; /* each key head is shared by a group of heads; equals n_head without flash
                                           * attention */
    int64_t                    n_stream;
} llmaas_attention;

llmaas_attention llmaas_attention_of(const llmaas_tap_view * view);
int64_t          llmaas_attention_position(const llmaas_tap_view * view, int64_t token);

/* Return whether a query's mask lets it see a cell, under the first head (density_mask.c). */
bool llmaas_attention_sees(const llmaas_attention * node, int64_t row, int64_t cell);

/* A thread's memory, all zero at first. Only its own thread uses it while a node runs. */
typedef struct llmaas_density_worker {
    double *  sums;     /* by cell, for this node */
    int64_t * deltas;   /* by cell: how many more (query, head) pairs see this cell than the previous cell */
    bool      is_used;  /* sums and deltas belong to this node */
    bool      has_failed;

    /* The members below serve one group of heads, one block of queries, or one query at a time. */
    float *   scores;   /* [query of the block][n_padded] */
    float *   keys;     /* tiles of a group's keys; see density_worker.c */
    bool *    is_made;  /* by tile */
    bool *    is_needed;
    float *   queries;  /* of a block, interleaved */
    void *    rounded;  /* a query in the type that keys are multiplied with */
    float *   bias;     /* the mask's values */
    int32_t * runs;     /* visible columns of a query: from, to, from, to... */
    int32_t   n_runs;
    bool      has_bias;
    int64_t   row, mask_head; /* the query and mask head that the runs belong to */
    int64_t   n_padded; /* columns there is room for */
    int64_t   n_keys;   /* floats there is room for */
    int64_t   d;
} llmaas_density_worker;

void llmaas_density_worker_free(llmaas_density_worker * w);

/* Find the columns that a query sees, and what the mask adds to their scores (density_mask.c). */
void llmaas_density_find_visible(
    llmaas_density_worker * w, const llmaas_attention * node, int64_t row, int64_t head);

/* Sampling of queries. The query at position p of layer l is sampled under head group g if p + 5 l + group_turn g is -1
 * modulo row_step. */
typedef struct llmaas_sampling {
    uint32_t row_step;
    uint32_t group_turn;
    uint32_t weight; /* how many queries each sampled one counts for */
} llmaas_sampling;

/* Return whether any query of the node is sampled under any head. */
bool llmaas_density_is_sampled(const llmaas_attention * node, llmaas_sampling sampling);

/* Add up thread ith's share of the sampled (query, head) pairs. */
void llmaas_density_worker_run(
    llmaas_density_worker * w, const llmaas_attention * node, llmaas_sampling sampling, int ith, int nth);

#endif
