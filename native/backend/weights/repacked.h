/* Products with the first columns of a weight that ggml-cpu keeps in its CPU_REPACK layout.
 *
 * In that layout the rows of a group are interleaved block by block, and a group's blocks follow each other. So the
 * first columns of a group are contiguous; but ggml-cpu's kernels assume that the next group starts right behind them.
 * For four rows of activations and more, we therefore pack the first columns of several groups. Single rows are
 * multiplied with the groups in place. */
#ifndef LLMAAS_REPACKED_H
#define LLMAAS_REPACKED_H

#include "base/graph.h"

/* Get the steps at which parts of `weight` can be cut: the rows that are interleaved, and the columns of a block. For a
 * weight that is not repacked: 1 row, its type's block. */
void llmaas_weight_steps(const struct ggml_tensor * weight, int64_t * row_step, int64_t * column_step);

/* Return whether our products with this weight work: the kernels are known, and were checked (once per type) to compute
 * what ggml-cpu computes. */
bool llmaas_repacked_columns_supported(const struct ggml_tensor * weight);

/* Append a product into the first n_rows of `node`'s rows (MUL_MAT or MUL_MAT_ID). It multiplies `weight`'s first
 * n_rows × n_cols (multiples of its steps) with the first n_cols of src[1]. `weight` takes the place of src[0]. Both
 * must live as long as the graph; the weight's data may appear as late as the product. False if out of memory. */
bool llmaas_repacked_columns(
    llmaas_graph * graph, const struct ggml_tensor * weight, struct ggml_tensor * node, int64_t n_rows, int64_t n_cols);

#endif
