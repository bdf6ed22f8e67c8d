/* The weight table of a model: for each weight that somebody claimed, where its bytes are and which part is used.
 *
 * A source and a part know nothing of each other: the part says how many rows and columns, the source appends the nodes
 * that multiply with them. To add one, write its functions and a claim for it (docs/engine.md). */
#ifndef LLMAAS_WEIGHTS_H
#define LLMAAS_WEIGHTS_H

#include "graph.h"
#include "llmaas/engine.h"
#include "lookup.h"
#include "stream.h"

#define LLMAAS_MAX_LEVELS 64

typedef struct llmaas_weight llmaas_weight;

/* Which part of a weight is used. */
typedef struct llmaas_part_ops {
    /* Rows and columns at `level`; they come in as the weight's own. */
    void (*extent)(const llmaas_weight * weight, uint32_t level, int64_t * n_rows, int64_t * n_columns);
} llmaas_part_ops;

typedef struct llmaas_extent {
    int64_t n_rows, n_columns;
} llmaas_extent;

extern const llmaas_part_ops llmaas_part_rows;
extern const llmaas_part_ops llmaas_part_columns;

/* Where a weight's bytes are. */
typedef struct llmaas_source_ops {
    /* Take over the weight as it is loaded: its bytes as the file has them. NULL: they stay in the model's own buffer. */
    bool (*load)(llmaas_weight * weight, const void * bytes);
    void (*unload)(llmaas_weight * weight); /* also what the claim made; may be NULL */
    /* NULL, or why this weight cannot be cut as it is claimed; in words that follow its name. */
    const char * (*problem)(const llmaas_weight * weight);
    /* Round up to where the weight can be cut; neither is 0. */
    void (*round)(const llmaas_weight * weight, int64_t * n_rows, int64_t * n_columns);
    /* Append what computes the first n_rows of `node`'s rows from n_rows × n_columns of the weight, instead of `node`
     * (MUL_MAT or MUL_MAT_ID with the weight as src[0]). Neither is 0. False: memory. */
    bool (*multiply)(
        const llmaas_weight * weight, llmaas_graph * graph, struct ggml_tensor * node, int64_t n_rows,
        int64_t n_columns);
} llmaas_source_ops;

extern const llmaas_source_ops llmaas_source_in_place;
extern const llmaas_source_ops llmaas_source_tiles;
extern const llmaas_source_ops llmaas_source_file;
extern const llmaas_source_ops llmaas_source_rows; /* looked up only */

/* State of a weight whose bytes are at `offset` of fd and come through `stream`; both live longer. NULL: memory. */
void * llmaas_file_state(llmaas_stream * stream, int fd, uint64_t offset, bool is_packed);

/* From the next graph on, products of such a weight with one token are those of its columns (channels.h), which its operand
 * has; it copies scales and mins. EINVAL: it has another shape, or columns already. ESPACE: memory. */
llmaas_status llmaas_file_columns(llmaas_weight * weight, const llmaas_columns * columns);

struct llmaas_weight {
    char                       name[GGML_MAX_NAME];
    const struct ggml_tensor * tensor; /* NULL until it is loaded, or first seen in a graph */
    const llmaas_source_ops *  source;
    void *                     state; /* the source's own */
    const llmaas_part_ops *    part;  /* NULL: all of it */
    uint32_t                   n_levels;
    int64_t                    extents[LLMAAS_MAX_LEVELS]; /* below 0: all */
    float *                    biases; /* [n_bias_levels][n_biases]; NULL: none */
    uint32_t                   n_bias_levels, n_biases;
    uint64_t                   biased_levels; /* bit l: some bias is not 0 at level l */
    uint64_t                   narrow_levels; /* bit l: it is not all, or biased, at level l */
    bool                       is_claimed;
    llmaas_lookup *            lookup;     /* of its rows; NULL: they are looked up where it is */
    bool                       is_used;    /* by some graph of a context's creation */
    int                        tap_kind; /* llmaas_tap_kind of its operand, or -1 */
    int                        tap_layer;
};

llmaas_weights * llmaas_weights_retain(llmaas_weights * weights);

/* What its weights in files are read through; NULL: there are none. */
llmaas_stream * llmaas_weights_stream(const llmaas_weights * weights);

/* Whether some weight is not all, or biased, at this level; and whether graphs must be rewritten. */
bool llmaas_weights_are_cut(const llmaas_weights * weights, int32_t level);
bool llmaas_weights_change(const llmaas_weights * weights, int32_t level);
bool llmaas_weights_own_buffers(const llmaas_weights * weights);

/* A file that was written to, or cut, since it was opened; NULL: none was. What was read since then is void, and as nobody knows
 * what of it was kept, so is everything read later. */
const char * llmaas_weights_changed(llmaas_weights * weights);

/* Entries must not change while they are used: lock around find(), and as long as what it returned is used. */
void                  llmaas_weights_lock(llmaas_weights * weights);
void                  llmaas_weights_unlock(llmaas_weights * weights);
const llmaas_weight * llmaas_weights_find(const llmaas_weights * weights, const struct ggml_tensor * tensor);

/* A tensor was allocated in our buffer type: from now on it is the weight that is claimed under its name, if one is. */
void llmaas_weights_loaded(llmaas_weights * weights, const struct ggml_tensor * tensor);
/* Note the weights that a new context's graph uses, and the operands that taps may want. */
void llmaas_weights_note(llmaas_weights * weights, struct ggml_cgraph * graph);

/* What is used of `weight` at `level`, rounded to what its source can do. */
llmaas_extent llmaas_weight_extent(const llmaas_weight * weight, int32_t level);

/* What is added to its products at `level`, [rows of the weight]; NULL: nothing. */
const float * llmaas_weight_biases(const llmaas_weight * weight, int32_t level);

/* The product of `weight` at `level`, in place of `node`; false: it is all of a weight in place, so keep `node`. Biases are
 * not in it. */
bool llmaas_weight_multiply(
    const llmaas_weight * weight, int32_t level, llmaas_graph * graph, struct ggml_tensor * node);

/* `node` narrowed to n_rows of its rows, from `first` on, and to the first columns of both operands; `weight` starts with the
 * first of these rows. It is not appended yet. NULL: memory. */
struct ggml_tensor * llmaas_product_of(
    llmaas_graph * graph, const struct ggml_tensor * weight, struct ggml_tensor * node, int64_t first, int64_t n_rows,
    int64_t n_columns);

#endif
