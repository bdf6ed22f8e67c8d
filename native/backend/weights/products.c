/* Products with claimed weights: which part of which weight computes a node. */
#include "base/rows.h"
#include "weights/weights.h"

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

/* Rows that were not computed are set to zero, as if the weight's other rows were zero. */
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

llmaas_extent llmaas_weight_extent(const llmaas_weight * weight, int32_t level) {
    const llmaas_extent all  = {weight->tensor->ne[1], weight->tensor->ne[0]};
    llmaas_extent       part = all;
    if (weight->part && level >= 0) {
        weight->part->extent(weight, (uint32_t) level, &part.n_rows, &part.n_columns);
    }
    if (part.n_rows > 0 && part.n_columns > 0) {
        weight->source->round(weight, &part.n_rows, &part.n_columns);
    }
    part.n_rows    = part.n_rows < all.n_rows ? part.n_rows : all.n_rows;
    part.n_columns = part.n_columns < all.n_columns ? part.n_columns : all.n_columns;
    return part;
}

static void multiply(const llmaas_weight * weight, llmaas_extent part, llmaas_graph * graph, struct ggml_tensor * node) {
    if (!weight->source->multiply(weight, graph, node, part.n_rows, part.n_columns)) {
        llmaas_graph_fail(graph);
    }
}

bool llmaas_weight_multiply(
    const llmaas_weight * weight, int32_t level, llmaas_graph * graph, struct ggml_tensor * node) {
    const llmaas_extent part = llmaas_weight_extent(weight, level);
    const bool is_all = part.n_rows == weight->tensor->ne[1] && part.n_columns == weight->tensor->ne[0];
    if (!weight->source->load && is_all) {
        return false;
    }
    const bool        is_none = part.n_rows == 0 || part.n_columns == 0;
    const struct rest rest    = {node, is_none ? 0 : part.n_rows};
    if (!is_none) {
        multiply(weight, part, graph, node);
    }
    if (rest.n_rows < node->ne[0]) {
        llmaas_graph_step(graph, clear_rest, &rest, sizeof rest);
    }
    return true;
}
