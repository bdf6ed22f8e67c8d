/* Adapters add their terms to products with any rows of activations: few and many of them, with gaps and permuted axes,
 * on any number of threads. */
#include "check.h"
#include "kernels/f16.h"

#include "llmaas/low_rank.h"
#include "weights/weights.h"

#include <math.h>

enum { N_IN = 70, N_OUT = 100, N_MOST = 70, LEVEL = 1 };

static uint8_t * random_matrix(uint32_t rank, uint32_t n) {
    const size_t n_bytes = llmaas_low_rank_bytes(rank, n), block_bytes = llmaas_low_rank_bytes(rank, LLMAAS_RANK_BLOCK);
    uint8_t *    bytes   = exact(n_bytes);
    fill_random(bytes, n_bytes);
    for (size_t at = 0; at < n_bytes; at += block_bytes) {
        for (uint32_t r = 0; r < rank; ++r) {
            const uint16_t scale = f16_from_f32((float) (1 + rnd_below(4)) / 1024);
            memcpy(bytes + at + 2 * r, &scale, sizeof scale);
        }
    }
    return bytes;
}

static double value_of(const uint8_t * bytes, uint32_t rank, uint32_t row, uint32_t column) {
    const uint8_t * block = bytes + column / LLMAAS_RANK_BLOCK * llmaas_low_rank_bytes(rank, LLMAAS_RANK_BLOCK);
    uint16_t        scale;
    memcpy(&scale, block + 2 * row, sizeof scale);
    return (double) f16_to_f32(scale) * (int8_t) block[2 * rank + row * LLMAAS_RANK_BLOCK + column % LLMAAS_RANK_BLOCK];
}

static void fill(struct ggml_tensor * tensor) {
    for (int64_t i = 0; i < ggml_nelements(tensor); ++i) {
        ((float *) tensor->data)[i] = (float) rnd_below(2001) / 1000.0f - 1.0f;
    }
}

static void compute(struct ggml_cgraph * graph, int n_threads) {
    struct ggml_cplan plan = ggml_graph_plan(graph, n_threads, NULL);
    plan.work_data         = exact(plan.work_size);
    CHECK(ggml_graph_compute(graph, &plan) == GGML_STATUS_SUCCESS);
    free(plan.work_data);
}

static float at(const struct ggml_tensor * t, int64_t i, int64_t row) {
    const int64_t i1 = row % t->ne[1], i2 = row / t->ne[1] % t->ne[2], i3 = row / t->ne[1] / t->ne[2];
    const char *  from = (const char *) t->data + (size_t) i1 * t->nb[1] + (size_t) i2 * t->nb[2] + (size_t) i3 * t->nb[3];
    return ((const float *) (const void *) from)[i];
}

/* Check that `found` is `plain` with the adapter's term added. */
static void check_term(const llmaas_adapter * one, const struct ggml_tensor * x, const struct ggml_tensor * plain,
                       const struct ggml_tensor * found) {
    for (int64_t row = 0; row < ggml_nrows(found); ++row) {
        double u[LLMAAS_MAX_RANK] = {0};
        for (uint32_t r = 0; r < one->rank; ++r) {
            for (uint32_t j = 0; j < one->n_columns; ++j) {
                u[r] += value_of(one->a, one->rank, r, j) * (double) at(x, j, row);
            }
        }
        for (uint32_t i = 0; i < N_OUT; ++i) {
            double expected = (double) at(plain, i, row);
            for (uint32_t r = 0; r < one->rank && i < one->n_rows; ++r) {
                expected += value_of(one->b, one->rank, r, i) * u[r];
            }
            CHECK(fabs(expected - (double) at(found, i, row)) <= 1e-4);
        }
    }
}

/* Check products of a weight with x; the operand is of N_IN columns. */
static void check_operand(struct ggml_context * ctx, struct ggml_tensor * x, int n_threads) {
    const uint32_t rank = 1 + rnd_below(16), n_columns = 1 + rnd_below(N_IN), n_rows = 1 + rnd_below(N_OUT);
    llmaas_adapter adapters[2] = {
        {0}, {rank, n_columns, n_rows, random_matrix(rank, n_columns), random_matrix(rank, n_rows)}};
    struct ggml_tensor * matrix = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, N_IN, N_OUT);
    fill(matrix);
    const llmaas_weight weight = {
        .tensor = matrix, .source = &llmaas_source_in_place, .adapters = adapters, .n_adapter_levels = 2};
    struct ggml_tensor * plain = ggml_mul_mat(ctx, matrix, x), * found = ggml_mul_mat(ctx, matrix, x);
    struct ggml_cgraph * original = ggml_new_graph(ctx);
    ggml_build_forward_expand(original, plain);
    ggml_build_forward_expand(original, found);
    llmaas_graph * graph = llmaas_graph_new();
    llmaas_graph_begin(graph, original);
    for (int i = 0; i < original->n_nodes; ++i) {
        llmaas_graph_append(graph, original->nodes[i]);
        if (original->nodes[i] == found) {
            llmaas_weight_adapt(&weight, 0, graph, found); /* nothing */
            llmaas_weight_adapt(&weight, LEVEL, graph, found);
        }
    }
    CHECK(llmaas_graph_end(graph)->n_nodes == original->n_nodes + 1);
    compute(llmaas_graph_end(graph), n_threads);
    check_term(&adapters[LEVEL], x, plain, found);
    llmaas_graph_free(graph);
    free((void *) (uintptr_t) adapters[LEVEL].a);
    free((void *) (uintptr_t) adapters[LEVEL].b);
}

static void check_operands(int64_t n, int n_threads) {
    struct ggml_context * ctx  = ggml_init((struct ggml_init_params) {.mem_size = 4u << 20});
    struct ggml_tensor *  wide = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, N_IN + 9, n);
    struct ggml_tensor *  deep = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, N_IN, 2, n, 1);
    fill(wide);
    fill(deep);
    check_operand(ctx, ggml_view_2d(ctx, wide, N_IN, n, wide->nb[1], 2 * sizeof(float)), n_threads);
    check_operand(ctx, ggml_permute(ctx, deep, 0, 2, 1, 3), n_threads);
    ggml_free(ctx);
}

/* -- claims ------------------------------------------------------------------------------------------------------- */

static const int64_t extents[] = {LLMAAS_ALL, 32};

static llmaas_status claim(llmaas_adapter one, uint32_t n_levels) {
    llmaas_weights * weights = llmaas_weights_new();
    CHECK(llmaas_weights_claim_part(weights, "w", LLMAAS_ROWS, extents, 2) == LLMAAS_OK);
    llmaas_adapter adapters[65];
    for (int i = 0; i < 65; ++i) {
        adapters[i] = one;
    }
    const llmaas_status status = llmaas_weights_claim_adapters(weights, "w", adapters, n_levels);
    if (status == LLMAAS_OK) {
        CHECK(llmaas_weights_claim_adapters(weights, "w", adapters, n_levels) == LLMAAS_EINVAL); /* twice */
    }
    llmaas_weights_release(weights);
    return status;
}

static void check_claims(void) {
    uint8_t *            a = random_matrix(3, 40), * b = random_matrix(3, 50);
    const llmaas_adapter one = {3, 40, 50, a, b};
    CHECK(claim(one, 1) == LLMAAS_OK && claim(one, 64) == LLMAAS_OK);
    CHECK(claim(one, 0) == LLMAAS_EINVAL && claim(one, 65) == LLMAAS_EINVAL);
    CHECK(claim((llmaas_adapter) {65, 40, 50, a, b}, 1) == LLMAAS_EINVAL);
    CHECK(claim((llmaas_adapter) {3, 0, 50, a, b}, 1) == LLMAAS_EINVAL);
    CHECK(claim((llmaas_adapter) {3, 40, 0, a, b}, 1) == LLMAAS_EINVAL);
    CHECK(claim((llmaas_adapter) {0}, 2) == LLMAAS_OK); /* none at any level */
    llmaas_weights * weights = llmaas_weights_new();
    CHECK(llmaas_weights_claim_adapters(weights, "w", &one, 1) == LLMAAS_EINVAL); /* no part is claimed */
    CHECK(llmaas_weights_claim_part(weights, "w", LLMAAS_ROWS, (int64_t[]) {LLMAAS_ALL}, 1) == LLMAAS_OK);
    CHECK(!llmaas_weights_are_cut(weights, 0));
    CHECK(llmaas_weights_claim_adapters(weights, "w", (llmaas_adapter[]) {{0}, one}, 2) == LLMAAS_OK);
    CHECK(!llmaas_weights_are_cut(weights, 0) && llmaas_weights_are_cut(weights, 1) && llmaas_weights_are_cut(weights, 63));
    llmaas_weights_release(weights);
    free(a);
    free(b);
}

int main(void) {
    for (int64_t n = 1; n <= N_MOST; n += n < 9 ? 1 : 7) {
        for (int n_threads = 1; n_threads <= 4; n_threads += n_threads == 2 ? 2 : 1) {
            check_operands(n, n_threads);
        }
    }
    check_claims();
    return 0;
}
