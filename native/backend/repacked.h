/* Products with the first columns of a weight that ggml-cpu keeps in its CPU_REPACK layout.
 *
 * There a group of rows is interleaved block by block, and a group's blocks follow each other, so the first columns of a
 * group are contiguous; but ggml-cpu's kernels take a group's length for the distance to the next. We pack several groups'
 * first columns for them (four rows of activations and more), or multiply single rows with the groups where they lie. */
#ifndef LLMAAS_REPACKED_H
#define LLMAAS_REPACKED_H

#include "graph.h"

/* Rows that are interleaved, and columns of a block: parts of `weight` are cut at multiples of them. For a weight that is
 * not repacked: 1 row, its type's block. */
void llmaas_weight_steps(const struct ggml_tensor * weight, int64_t * row_step, int64_t * column_step);

/* Whether ggml-cpu has the kernels we know for this type. */
bool llmaas_repacked_kernels_known(enum ggml_type type);
/* Whether they are known for this weight, and were found to compute what ggml-cpu computes (checked once a type). */
bool llmaas_repacked_columns_supported(const struct ggml_tensor * weight);

/* Append the product of `weight`'s first n_rows × n_cols (multiples of its steps) with the first n_cols of src[1] of
 * `node` (MUL_MAT or MUL_MAT_ID), into the first n_rows of `node`'s rows. `weight` stands for src[0]; both live as long as the
 * graph, and its data need not be there before that gets to the product. False: memory. */
bool llmaas_repacked_columns(
    llmaas_graph * graph, const struct ggml_tensor * weight, struct ggml_tensor * node, int64_t n_rows, int64_t n_cols);

#endif
