/* Weights that stay where llama.cpp loaded them, plain or repacked. */
#include "base/cpu.h"
#include "weights/repacked.h"
#include "weights/weights.h"

static int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

static void round_extents(const llmaas_weight * weight, int64_t * n_rows, int64_t * n_columns) {
    int64_t row_step, column_step;
    llmaas_weight_steps(weight->tensor, &row_step, &column_step);
    *n_rows    = round_up(*n_rows, row_step);
    *n_columns = round_up(*n_columns, column_step);
}

static const char * problem(const llmaas_weight * weight) {
    if (!weight->part || ggml_backend_buffer_is_host(weight->tensor->buffer)) {
        return NULL;
    }
    if (!llmaas_is_repacked(weight->tensor)) {
        return "lies in a buffer whose layout is not known, so no part of it can be used in place; claim tiles for it";
    }
    if (weight->part == &llmaas_part_columns && !llmaas_repacked_columns_supported(weight->tensor)) {
        return "is repacked in a way whose columns cannot be cut on this processor; claim tiles for it";
    }
    return NULL;
}

static bool multiply(
    const llmaas_weight * weight, llmaas_graph * graph, struct ggml_tensor * node, int64_t n_rows, int64_t n_columns) {
    if (n_columns < weight->tensor->ne[0] && llmaas_is_repacked(weight->tensor)) {
        return llmaas_repacked_columns(graph, weight->tensor, node, n_rows, n_columns);
    }
    struct ggml_tensor * product = llmaas_product_of(graph, weight->tensor, node, 0, n_rows, n_columns);
    if (product) {
        llmaas_graph_append(graph, product);
    }
    return product != NULL;
}

const llmaas_source_ops llmaas_source_in_place = {.problem = problem, .round = round_extents, .multiply = multiply};
