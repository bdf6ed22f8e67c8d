/* The weight table of a model: for each claimed weight, where its bytes are and which part is used.
 *
 * A source and a part are independent: the part gives the number of rows and columns, and the source appends the nodes
 * that multiply with them. To add a source or a part, write its functions and a claim for it (docs/explanation/engine.md). */
#ifndef LLMAAS_WEIGHTS_H
#define LLMAAS_WEIGHTS_H

#include "base/graph.h"
#include "llmaas/engine.h"
#include "stream/lookup.h"
#include "stream/stream.h"

#define LLMAAS_MAX_LEVELS 64

typedef struct llmaas_weight llmaas_weight;

/* Which part of a weight is used. */
typedef struct llmaas_part_ops {
    /* Narrow the weight's own rows and columns to those used at `level`. */
    void (*extent)(const llmaas_weight * weight, uint32_t level, int64_t * n_rows, int64_t * n_columns);
} llmaas_part_ops;

typedef struct llmaas_extent {
    int64_t n_rows, n_columns;
} llmaas_extent;

extern const llmaas_part_ops llmaas_part_rows;
extern const llmaas_part_ops llmaas_part_columns;

/* Where a weight's bytes are. */
typedef struct llmaas_source_ops {
    /* Take over the weight as it is loaded; `bytes` are as in the file. A NULL `load` leaves the bytes in the model's
     * own buffer. */
    bool (*load)(llmaas_weight * weight, const void * bytes);
    void (*unload)(llmaas_weight * weight); /* also frees the state that the claim made; may be NULL */
    /* Return why this weight cannot be cut as claimed, in words that follow its name, or NULL. */
    const char * (*problem)(const llmaas_weight * weight);
    /* Round up to where the weight can be cut; neither number is 0. */
    void (*round)(const llmaas_weight * weight, int64_t * n_rows, int64_t * n_columns);
    /* Append nodes that compute the first n_rows of `node`'s rows from n_rows × n_columns of the weight, in place of
     * `node` (MUL_MAT or MUL_MAT_ID with the weight as src[0]). Neither number is 0. False if out of memory. */
    bool (*multiply)(
        const llmaas_weight * weight, llmaas_graph * graph, struct ggml_tensor * node, int64_t n_rows,
        int64_t n_columns);
} llmaas_source_ops;

extern const llmaas_source_ops llmaas_source_in_place;
extern const llmaas_source_ops llmaas_source_tiles;
extern const llmaas_source_ops llmaas_source_file;
extern const llmaas_source_ops llmaas_source_rows; /* for weights that are only looked up */

/* Create the state of a weight whose bytes are at `offset` of fd and are read through `stream`; both must outlive it.
 * NULL if out of memory. */
void * llmaas_file_state(llmaas_stream * stream, int fd, uint64_t offset, bool is_packed);

/* From the next graph on, compute one-token products of such a weight from the columns (channels.h) in its operand.
 * Copies scales and mins. EINVAL: the weight has another shape, or already has columns. ESPACE: out of memory. */
llmaas_status llmaas_file_columns(llmaas_weight * weight, const llmaas_columns * columns);
/* Keep the first n_rows × n_columns of a weight before the rest of all weights, from the next graph on; no rows: none. */
void llmaas_file_keep_first(llmaas_weight * weight, int64_t n_rows, int64_t n_columns);
/* Keep the pieces of a weight that has columns in spare memory only: tokens do not use them. */
void llmaas_file_spare(llmaas_weight * weight);

struct llmaas_weight {
    char                       name[GGML_MAX_NAME];
    const struct ggml_tensor * tensor; /* NULL until the weight is loaded, or first seen in a graph */
    const llmaas_source_ops *  source;
    void *                     state; /* private to the source */
    const llmaas_part_ops *    part;  /* NULL: all of the weight */
    uint32_t                   n_levels;
    int64_t                    extents[LLMAAS_MAX_LEVELS]; /* negative: all */
    float *                    biases; /* [n_bias_levels][n_biases]; NULL: none */
    uint32_t                   n_bias_levels, n_biases;
    uint64_t                   biased_levels; /* bit l: some bias is not 0 at level l */
    llmaas_adapter *           adapters;      /* [n_adapter_levels]; NULL: none */
    uint32_t                   n_adapter_levels;
    uint64_t                   changed_levels; /* bit l: products are not plain: the weight is not whole, is biased, or
                                                * has an adapter at level l */
    bool                       is_claimed;
    llmaas_lookup *            lookup;     /* of the weight's rows; NULL: rows are looked up in the weight itself */
    bool                       is_used;    /* by some graph of a context's creation */
    int                        tap_kind; /* llmaas_tap_kind of the weight's operand, or -1 */
    int                        tap_layer;
};

llmaas_weights * llmaas_weights_retain(llmaas_weights * weights);

/* Return the stream of the weights in files; NULL if there are none. */
llmaas_stream * llmaas_weights_stream(const llmaas_weights * weights);

/* Return whether some weight's products are not plain at this level; or whether graphs must be rewritten. */
bool llmaas_weights_are_cut(const llmaas_weights * weights, int32_t level);
bool llmaas_weights_change(const llmaas_weights * weights, int32_t level);
/* Return whether this is a child that was forked while another thread was changing entries. */
bool llmaas_weights_are_void(const llmaas_weights * weights);
bool llmaas_weights_own_buffers(const llmaas_weights * weights);

/* Return the path of a file that was written to or truncated since it was opened, or NULL. Everything read since then
 * is void. Nobody knows which kept bytes are affected, so everything read later is void, too. */
const char * llmaas_weights_changed(llmaas_weights * weights);

/* Lock the entries against changes: lock before find(), and unlock when its result is no longer used. */
void                  llmaas_weights_lock(llmaas_weights * weights);
void                  llmaas_weights_unlock(llmaas_weights * weights);
const llmaas_weight * llmaas_weights_find(const llmaas_weights * weights, const struct ggml_tensor * tensor);

/* Record that a tensor was allocated in our buffer type. If a weight is claimed under its name, the tensor is that
 * weight from now on. */
void llmaas_weights_loaded(llmaas_weights * weights, const struct ggml_tensor * tensor);
/* Note the weights that a new context's graph uses, and the operands that taps may want. */
void llmaas_weights_note(llmaas_weights * weights, struct ggml_cgraph * graph);

/* Return the part of `weight` that is used at `level`, rounded to what its source can do. */
llmaas_extent llmaas_weight_extent(const llmaas_weight * weight, int32_t level);

/* Return what is added to the weight's products at `level`, [rows of the weight]; NULL: nothing. */
const float * llmaas_weight_biases(const llmaas_weight * weight, int32_t level);

/* Return the low-rank term of the weight's products at `level`; NULL: none. */
const llmaas_adapter * llmaas_weight_adapter(const llmaas_weight * weight, int32_t level);
/* Return whether all adapters fit the weight's tensor. */
bool llmaas_weight_adapters_fit(const llmaas_weight * weight);
/* Append a step that adds the adapter's term at `level`, if any, to `product`: the weight's MUL_MAT node that was appended
 * last. */
void llmaas_weight_adapt(
    const llmaas_weight * weight, int32_t level, llmaas_graph * graph, const struct ggml_tensor * product);

/* Append the product of `weight` at `level` in place of `node`, without biases or adapters. False: the weight is used whole and in
 * place, so keep `node`. */
bool llmaas_weight_multiply(
    const llmaas_weight * weight, int32_t level, llmaas_graph * graph, struct ggml_tensor * node);

/* Copy `node`, narrowed to n_rows of its rows from `first` on, and to the first columns of both operands. `weight`
 * starts with the first of these rows. Do not append the copy. NULL if out of memory. */
struct ggml_tensor * llmaas_product_of(
    llmaas_graph * graph, const struct ggml_tensor * weight, struct ggml_tensor * node, int64_t first, int64_t n_rows,
    int64_t n_columns);

#endif
