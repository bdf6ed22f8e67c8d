/* Products with a part of a repacked weight are bit-identical to what ggml-cpu computes with that part alone. */
#include "check.h"

#include "base/cpu.h"
#include "ggml-alloc.h"
#include "weights/repacked.h"

enum { N_ROWS = 72, N_BLOCKS = 5, N_EXPERTS = 3 };

static const enum ggml_type types[] = {
    GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL, GGML_TYPE_MXFP4, GGML_TYPE_Q2_K, GGML_TYPE_Q4_K};

static float value_at(int64_t expert, int64_t row, int64_t col) {
    check_seed = (uint64_t) (expert * 7919 + row) << 32 | (uint64_t) col;
    return (float) rnd_below(2001) / 1000.0f - 1.0f;
}

/* Make a repacked weight of the given size, in its own context, whose values depend only on their place. */
static struct ggml_tensor * new_weight(
    struct ggml_context * ctx, enum ggml_type type, int64_t n_cols, int64_t n_rows, int64_t n_experts) {
    struct ggml_tensor * weight = ggml_new_tensor_3d(ctx, type, n_cols, n_rows, n_experts);
    CHECK(ggml_backend_alloc_ctx_tensors_from_buft(ctx, llmaas_repack_type()));
    float *   values = malloc((size_t) n_cols * sizeof *values);
    uint8_t * bytes  = exact(ggml_nbytes(weight));
    for (int64_t row = 0; row < n_rows * n_experts; ++row) {
        for (int64_t col = 0; col < n_cols; ++col) {
            values[col] = value_at(row / n_rows, row % n_rows, col);
        }
        ggml_quantize_chunk(type, values, bytes + (size_t) row * weight->nb[1], 0, 1, n_cols, NULL);
    }
    if (weight->extra) {
        ggml_backend_tensor_set(weight, bytes, 0, ggml_nbytes(weight));
    }
    free(bytes);
    free(values);
    return weight;
}

static struct ggml_context * new_context(bool no_alloc) {
    const struct ggml_init_params params = {.mem_size = 8 << 20, .no_alloc = no_alloc};
    struct ggml_context *         ctx    = ggml_init(params);
    CHECK(ctx);
    return ctx;
}

static void compute(struct ggml_cgraph * graph, int n_threads) {
    struct ggml_cplan plan = ggml_graph_plan(graph, n_threads, NULL);
    plan.work_data         = exact(plan.work_size);
    CHECK(ggml_graph_compute(graph, &plan) == GGML_STATUS_SUCCESS);
    free(plan.work_data);
}

/* Compute `node`, a product of a whole weight, from the weight's first n_rows × n_cols. */
static void compute_part(
    struct ggml_context * ctx, struct ggml_tensor * node, int64_t n_rows, int64_t n_cols, int n_threads) {
    struct ggml_cgraph * original = ggml_new_graph(ctx);
    ggml_build_forward_expand(original, node);
    llmaas_graph * graph = llmaas_graph_new();
    CHECK(graph);
    llmaas_graph_begin(graph, original);
    CHECK(llmaas_repacked_columns(graph, node->src[0], node, n_rows, n_cols));
    struct ggml_cgraph * rewritten = llmaas_graph_end(graph);
    CHECK(rewritten);
    memset(node->data, 0xff, ggml_nbytes(node));
    compute(rewritten, n_threads);
    llmaas_graph_free(graph);
}

/* Check that every row of `part` starts with the same row of `expected`, and that its rest was not written. */
static void check_rows(const struct ggml_tensor * part, const struct ggml_tensor * expected) {
    const size_t n = (size_t) expected->ne[0] * sizeof(float);
    CHECK(ggml_nrows(part) == ggml_nrows(expected));
    for (int64_t row = 0; row < ggml_nrows(part); ++row) {
        const uint8_t * found = (const uint8_t *) part->data + (size_t) row * part->nb[1];
        CHECK(memcmp(found, (const uint8_t *) expected->data + (size_t) row * expected->nb[1], n) == 0);
        for (size_t i = n; i < (size_t) part->ne[0] * sizeof(float); ++i) {
            CHECK(found[i] == 0xff);
        }
    }
}

/* Make activations in rows longer than n_cols, of which the first n_cols are used. */
static struct ggml_tensor * new_input(struct ggml_context * ctx, int64_t n_cols, int64_t n_rows, int64_t n_planes) {
    const int64_t        stride = n_cols + 40;
    struct ggml_tensor * all    = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, stride, n_rows, n_planes);
    for (int64_t i = 0; i < ggml_nelements(all); ++i) {
        ((float *) all->data)[i] = value_at(1000, i / stride, i % stride);
    }
    return ggml_view_3d(ctx, all, n_cols, n_rows, n_planes, all->nb[1], all->nb[2], 0);
}

/* Copy the first columns: ggml-cpu's quantizer assumes that four rows of activations are contiguous. */
static struct ggml_tensor * cut(struct ggml_context * ctx, struct ggml_tensor * input, int64_t n_cols) {
    struct ggml_tensor * copy = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_cols, input->ne[1], input->ne[2]);
    for (int64_t row = 0; row < ggml_nrows(input); ++row) {
        const uint8_t * from = (const uint8_t *) input->data + (size_t) row * input->nb[1];
        memcpy((uint8_t *) copy->data + (size_t) row * copy->nb[1], from, copy->nb[1]);
    }
    return copy;
}

/* Check the part's product against ggml-cpu's own product with the cut weight; free both weights. */
static void check_against(
    struct ggml_context * ctx, const struct ggml_tensor * node, struct ggml_tensor * expected) {
    struct ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, expected);
    compute(graph, 1);
    check_rows(node, expected);
    ggml_backend_buffer_free(node->src[0]->buffer);
    ggml_backend_buffer_free(expected->src[0]->buffer);
}

static void test_product(
    enum ggml_type type, int64_t n_inputs, int64_t n_planes, int64_t n_rows, int64_t n_blocks, int n_threads) {
    const int64_t         block  = ggml_blck_size(type);
    struct ggml_context * whole  = new_context(true);
    struct ggml_context * part   = new_context(true);
    struct ggml_context * values = new_context(false);
    struct ggml_tensor *  weight = new_weight(whole, type, N_BLOCKS * block, N_ROWS, 1);
    struct ggml_tensor *  input  = new_input(values, N_BLOCKS * block, n_inputs, n_planes);
    struct ggml_tensor *  node   = ggml_mul_mat(values, weight, input);
    CHECK(llmaas_repacked_columns_supported(weight));
    compute_part(values, node, n_rows, n_blocks * block, n_threads);

    struct ggml_tensor * cut_weight = new_weight(part, type, n_blocks * block, n_rows, 1);
    struct ggml_tensor * expected   = ggml_mul_mat(values, cut_weight, cut(values, input, n_blocks * block));
    check_against(values, node, expected);
    ggml_free(values);
    ggml_free(part);
    ggml_free(whole);
}

static struct ggml_tensor * new_ids(struct ggml_context * ctx, int64_t n_used, int64_t n_tokens) {
    struct ggml_tensor * ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_used, n_tokens);
    for (int64_t i = 0; i < n_used * n_tokens; ++i) {
        ((int32_t *) ids->data)[i] = (int32_t) ((i / n_used + i % n_used) % N_EXPERTS);
    }
    return ids;
}

static void test_experts(
    enum ggml_type type, int64_t n_inputs, int64_t n_tokens, int64_t n_rows, int64_t n_blocks, int n_threads) {
    const int64_t         block  = ggml_blck_size(type);
    struct ggml_context * whole  = new_context(true);
    struct ggml_context * part   = new_context(true);
    struct ggml_context * values = new_context(false);
    struct ggml_tensor *  ids    = new_ids(values, 2, n_tokens);
    struct ggml_tensor *  weight = new_weight(whole, type, N_BLOCKS * block, N_ROWS, N_EXPERTS);
    struct ggml_tensor *  input  = new_input(values, N_BLOCKS * block, n_inputs, n_tokens);
    struct ggml_tensor *  node   = ggml_mul_mat_id(values, weight, input, ids);
    compute_part(values, node, n_rows, n_blocks * block, n_threads);

    struct ggml_tensor * cut_weight = new_weight(part, type, n_blocks * block, n_rows, N_EXPERTS);
    struct ggml_tensor * expected   = ggml_mul_mat_id(values, cut_weight, cut(values, input, n_blocks * block), ids);
    check_against(values, node, expected);
    ggml_free(values);
    ggml_free(part);
    ggml_free(whole);
}

static void test_type(enum ggml_type type) {
    static const int64_t inputs[] = {1, 3, 4, 7, 39};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; ++i) {
        for (int n_threads = 1; n_threads <= 3; ++n_threads) {
            test_product(type, inputs[i], 1, N_ROWS, N_BLOCKS, n_threads);
            test_product(type, inputs[i], 1, N_ROWS, 2, n_threads);
            test_product(type, inputs[i], 1, 40, N_BLOCKS, n_threads);
            test_product(type, inputs[i], 1, 8, 1, n_threads);
        }
    }
    test_product(type, 6, 3, 40, 3, 2); /* planes of activations */
    for (int n_threads = 1; n_threads <= 3; ++n_threads) {
        test_experts(type, 2, 5, N_ROWS, N_BLOCKS, n_threads);
        test_experts(type, 1, 5, 40, 2, n_threads); /* all experts of a token share its row */
        test_experts(type, 2, 1, 8, 1, n_threads);
    }
}

static void test_steps(void) {
    int64_t               rows, columns;
    struct ggml_context * plain  = new_context(false);
    struct ggml_context * packed = new_context(true);
    struct ggml_tensor *  weight = ggml_new_tensor_2d(plain, GGML_TYPE_Q4_0, 64, 8);
    llmaas_weight_steps(weight, &rows, &columns);
    CHECK(rows == 1 && columns == 32 && !llmaas_is_repacked(weight) && !llmaas_repacked_columns_supported(weight));
    weight = new_weight(packed, GGML_TYPE_Q4_K, 512, 8, 1);
    llmaas_weight_steps(weight, &rows, &columns);
    CHECK(rows == 8 && columns == 256 && llmaas_is_repacked(weight));
    ggml_backend_buffer_free(weight->buffer);
    ggml_free(packed);
    ggml_free(plain);
}

/* Return whether this processor's ggml-cpu repacks the type: others never lie in its buffers. */
static bool repacks(enum ggml_type type) {
    struct ggml_context * ctx    = new_context(true);
    struct ggml_tensor *  weight = new_weight(ctx, type, ggml_blck_size(type), 8, 1);
    const bool            yes    = weight->extra != NULL;
    ggml_backend_buffer_free(weight->buffer);
    ggml_free(ctx);
    return yes;
}

static void no_log(enum ggml_log_level level, const char * text, void * user) {
    (void) level;
    (void) text;
    (void) user;
}

int main(void) {
    ggml_log_set(no_log, NULL);
    if (!llmaas_repack_type()) {
        return 0;
    }
    test_steps();
    for (size_t i = 0; i < sizeof types / sizeof *types; ++i) {
        if (repacks(types[i])) {
            test_type(types[i]);
            printf("%s\n", ggml_type_name(types[i]));
        }
    }
    return 0;
}
