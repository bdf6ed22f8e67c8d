/* Products with claimed weights: what part of which weight stands for a node. */
#include "weights.h"

#include <string.h>

bool llmaas_append_product(
    llmaas_graph * graph, const struct ggml_tensor * weight, struct ggml_tensor * node, int64_t n_rows,
    int64_t n_columns) {
    struct ggml_tensor * product  = llmaas_graph_copy(graph, node);
    struct ggml_tensor * narrow   = llmaas_graph_copy(graph, weight);
    struct ggml_tensor * operands = llmaas_graph_copy(graph, node->src[1]);
    if (!product || !narrow || !operands) {
        return false;
    }
    narrow->ne[0] = operands->ne[0] = n_columns; /* strides stay, so the rest of each row is skipped */
    narrow->ne[1] = product->ne[0] = n_rows;
    product->src[0] = narrow;
    product->src[1] = operands;
    llmaas_graph_append(graph, product);
    return true;
}

/* Rows that were not computed are zero, as if the weight's other rows were. */
struct rest {
    struct ggml_tensor * node;
    int64_t              n_rows;
};

static void clear_rest(void * arg, int ith, int nth) {
    const struct rest *        rest = arg;
    const struct ggml_tensor * node = rest->node;
    const int64_t              n    = node->ne[1] * node->ne[2] * node->ne[3];
    for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth; i++) {
        const int64_t i1 = i % node->ne[1], i2 = i / node->ne[1] % node->ne[2], i3 = i / node->ne[1] / node->ne[2];
        char *        row = (char *) node->data + (size_t) i1 * node->nb[1] + (size_t) i2 * node->nb[2] +
                     (size_t) i3 * node->nb[3];
        memset(row + (size_t) rest->n_rows * sizeof(float), 0, (size_t) (node->ne[0] - rest->n_rows) * sizeof(float));
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
    weight->source->multiply(weight, graph, node, n_rows, n_columns);
    if (n_rows < all_rows) {
        const struct rest rest = {node, n_rows};
        llmaas_graph_step(graph, clear_rest, &rest, sizeof rest);
    }
    return true;
}
