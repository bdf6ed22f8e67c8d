/* Checks, once per type, that our products with repacked weights equal those of ggml-cpu bit for bit. */
#include "base/cpu.h"
#include "ggml-alloc.h"
#include "weights/repacked.h"
#include "weights/repacked_kernels.h"
#include "weights/repacked_rows.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Sizes that take every path through the kernels: gemm with sixteen rows of activations and with four, left-over rows,
 * and a single row. */
enum { CHECK_GROUPS = 2 * LLMAAS_STREAMS + 3, CHECK_BLOCKS = 3, CHECK_PREFIX = 2, CHECK_BATCHES = 16 + 4 + 3 };
enum { CHECK_ROWS = CHECK_GROUPS * 8 };

/* A small product, computed by ggml-cpu with its weight repacked. */
struct trial {
    struct ggml_context * weights;
    struct ggml_context * values;
    ggml_backend_buffer_t buffer;
    struct ggml_cgraph *  graph;
    struct ggml_tensor *  node;
};

/* Fill a row of a trial's weight or input; the value at (row, column) does not depend on the number of columns. */
static void fill_row(float * values, int64_t n_cols, uint32_t row) {
    uint32_t state = row * 2654435761u + 1;
    for (int64_t i = 0; i < n_cols; ++i) {
        state     = state * 1664525u + 1013904223u;
        values[i] = (float) (state >> 8) / (float) (1 << 23) - 1.0f;
    }
}

static bool set_weight(struct ggml_tensor * weight) {
    const size_t row_size = ggml_row_size(weight->type, weight->ne[0]);
    float *      values   = malloc((size_t) weight->ne[0] * sizeof *values);
    char *       rows     = malloc(CHECK_ROWS * row_size);
    const bool   ok       = values && rows && weight->extra; /* extra: how ggml-cpu repacks it */
    for (uint32_t row = 0; ok && row < CHECK_ROWS; ++row) {
        fill_row(values, weight->ne[0], row);
        ggml_quantize_chunk(weight->type, values, rows + row * row_size, 0, 1, weight->ne[0], NULL);
    }
    if (ok) {
        ggml_backend_tensor_set(weight, rows, 0, CHECK_ROWS * row_size);
    }
    free(values);
    free(rows);
    return ok;
}

static void trial_end(struct trial * trial) {
    ggml_backend_buffer_free(trial->buffer);
    ggml_free(trial->values);
    ggml_free(trial->weights);
}

static bool trial_run(struct trial * trial, enum ggml_type type, int64_t n_cols, int64_t n_inputs) {
    const struct ggml_init_params weights = {.mem_size = 2 * ggml_tensor_overhead(), .no_alloc = true};
    const struct ggml_init_params values  = {.mem_size = 1 << 20};
    *trial = (struct trial) {.weights = ggml_init(weights), .values = ggml_init(values)};
    if (!trial->weights || !trial->values) {
        return false;
    }
    struct ggml_tensor * weight = ggml_new_tensor_2d(trial->weights, type, n_cols, CHECK_ROWS);
    trial->buffer               = ggml_backend_alloc_ctx_tensors_from_buft(trial->weights, llmaas_repack_type());
    if (!trial->buffer || !set_weight(weight)) {
        return false;
    }
    struct ggml_tensor * input = ggml_new_tensor_2d(trial->values, GGML_TYPE_F32, n_cols, n_inputs);
    for (uint32_t row = 0; row < n_inputs; ++row) {
        fill_row((float *) input->data + row * n_cols, n_cols, CHECK_ROWS + row);
    }
    trial->node  = ggml_mul_mat(trial->values, weight, input);
    trial->graph = ggml_new_graph(trial->values);
    ggml_build_forward_expand(trial->graph, trial->node);
    return ggml_graph_compute_with_ctx(trial->values, trial->graph, 1) == GGML_STATUS_SUCCESS;
}

/* Return whether our product of the first columns of `whole` equals that of `expected`, a trial that has only these
 * columns. */
static bool same_product(const struct trial * whole, const struct trial * expected) {
    float              result[CHECK_ROWS * CHECK_BATCHES];
    struct ggml_tensor node  = *whole->node;
    node.data                = result;
    llmaas_graph * rewritten = llmaas_graph_new();
    if (!rewritten) {
        return false;
    }
    llmaas_graph_begin(rewritten, whole->graph);
    llmaas_repacked_columns(rewritten, node.src[0], &node, CHECK_ROWS, expected->node->src[1]->ne[0]);
    struct ggml_cgraph * graph = llmaas_graph_end(rewritten);
    const bool           same  = graph && ggml_graph_compute_with_ctx(whole->values, graph, 1) == GGML_STATUS_SUCCESS &&
                      memcmp(result, expected->node->data, ggml_nbytes(expected->node)) == 0;
    llmaas_graph_free(rewritten);
    return same;
}

static bool check(enum ggml_type type, int64_t n_inputs) {
    const int64_t block = ggml_blck_size(type);
    struct trial  whole, prefix;
    const bool    ran_whole  = trial_run(&whole, type, CHECK_BLOCKS * block, n_inputs);
    const bool    ran_prefix = trial_run(&prefix, type, CHECK_PREFIX * block, n_inputs);
    const bool    same = ran_whole && ran_prefix && same_product(&whole, &whole) && same_product(&whole, &prefix);
    trial_end(&whole);
    trial_end(&prefix);
    return same;
}

bool llmaas_repacked_columns_supported(const struct ggml_tensor * weight) {
    enum { UNKNOWN, YES, NO };
    static atomic_int verdicts[GGML_TYPE_COUNT]; /* racing threads store the same value */
    if (!llmaas_is_repacked(weight) || !llmaas_repacked_kernels_of(weight->type)) {
        return false;
    }
    atomic_int * verdict = &verdicts[weight->type];
    if (atomic_load(verdict) == UNKNOWN) {
        atomic_store(verdict, check(weight->type, CHECK_BATCHES) && check(weight->type, 1) ? YES : NO);
    }
    return atomic_load(verdict) == YES;
}
