/* Products with claimed weights: what part of which weight stands for a node. */
#include "rows.h"
#include "weights.h"

#include <string.h>

struct ggml_tensor * llmaas_product_of(
    llmaas_graph * graph, const struct ggml_tensor * weight, struct ggml_tensor * node, int64_t first, int64_t n_rows,
    int64_t n_columns) {
    struct ggml_tensor * product  = llmaas_graph_copy(graph, node);
    struct ggml_tensor * narrow   = llmaas_graph_copy(graph, weight);
    struct ggml_tensor * operands = llmaas_graph_copy(graph, node->src[1]);
    if (!product || !narrow || !operands) {
        return NULL;
    }
    narrow->ne[0] = operands->ne[0] = n_columns; /* strides stay, so the rest of each row is skipped */
    narrow->ne[1] = product->ne[0] = n_rows;
    product->data   = (char *) node->data + (size_t) first * sizeof(float);
    product->src[0] = narrow;
    product->src[1] = operands;
    return product;
}

/* Rows that were not computed are zero, as if the weight's other rows were. */
struct rest {
    struct ggml_tensor * node;
    int64_t              n_rows;
};

static void clear_rest(void * arg, int ith, int nth) {
    const struct rest * rest   = arg;
    const int64_t       n      = ggml_nrows(rest->node);
    const size_t        n_done = (size_t) rest->n_rows * sizeof(float);
    const size_t        n_left = (size_t) (rest->node->ne[0] - rest->n_rows) * sizeof(float);
    for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth; i++) {
        memset(llmaas_row(rest->node, i) + n_done, 0, n_left);
    }
}

bool llmaas_weight_multiply(
    const llmaas_weight * weight, int32_t level, llmaas_graph * graph, struct ggml_tensor * node) {
    const int64_t all_rows = weight->tensor->ne[1], all_columns = weight->tensor->ne[0];
    int64_t       n_rows = all_rows, n_columns = all_columns;
    if (weight->part && level >= 0) {
        weight->part->extent(weight, (uint32_t) level, &n_rows, &n_columns);
        weight->source->round(weight, &n_rows, &n_columns);
        n_rows    = n_rows < all_rows ? n_rows : all_rows;
        n_columns = n_columns < all_columns ? n_columns : all_columns;
    }
    if (!weight->source->load && n_rows == all_rows && n_columns == all_columns) {
        return false;
    }
    if (!weight->source->multiply(weight, graph, node, n_rows, n_columns)) {
        llmaas_graph_fail(graph);
    }
    if (n_rows < all_rows) {
        const struct rest rest = {node, n_rows};
        llmaas_graph_step(graph, clear_rest, &rest, sizeof rest);
    }
    return true;
}
