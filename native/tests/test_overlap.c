/* The tap that compares large values of two layers, against counts of the same values. */
#include "tap_threads.h"

#include <math.h>

enum { N_LAYERS = 4, N_CHANNELS = 37, N_ROWS = 20, N_THRESHOLDS = 3 };

static const uint32_t n_channels[N_LAYERS] = {N_CHANNELS, 0, N_CHANNELS, N_CHANNELS};
static const int32_t  predictors[N_LAYERS] = {-1, -1, 0, 0};
static const float    thresholds[N_LAYERS][N_THRESHOLDS] = {
    {0.1f, 0.5f, 0.9f}, {0}, {0.2f, 0.4f, 0.8f}, {0.0f, 0.5f, 2.0f}};

static llmaas_overlap * overlap_new(void) {
    llmaas_overlap * made =
        llmaas_overlap_new(LLMAAS_TAP_ATTN_INPUT, N_LAYERS, n_channels, predictors, N_THRESHOLDS, thresholds[0]);
    CHECK(made);
    return made;
}

static struct ggml_tensor * random_rows(struct ggml_context * ctx, int n, int n_rows) {
    struct ggml_tensor * rows = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, n_rows);
    for (int i = 0; i < n * n_rows; ++i) {
        ((float *) rows->data)[i] = (float) rnd_below(1 << 24) / (1 << 23) - 1.0f;
    }
    return rows;
}

static void put_rows(llmaas_overlap * overlap, int layer, const struct ggml_tensor * rows) {
    const llmaas_tap_view view = {.kind = LLMAAS_TAP_ATTN_INPUT, .layer = layer, .states = rows};
    run_tap(llmaas_overlap_tap(overlap), &view, 1, 3);
}

static bool is_large(const struct ggml_tensor * rows, int i, int layer, int k) {
    return fabsf(((const float *) rows->data)[i]) >= thresholds[layer][k];
}

/* Check that a layer counted `n` times these rows, with those of layer 0 beside them. */
static void check_counted(
    llmaas_overlap * overlap, int layer, const struct ggml_tensor * own, const struct ggml_tensor * first, uint64_t n) {
    uint64_t * const used = (uint64_t *) (void *) exact(N_THRESHOLDS * sizeof(uint64_t));
    uint64_t * const both = (uint64_t *) (void *) exact(N_THRESHOLDS * sizeof(uint64_t));
    CHECK(llmaas_overlap_read(overlap, layer, used, both) == LLMAAS_OK);
    for (int k = 0; k < N_THRESHOLDS; ++k) {
        uint64_t n_used = 0, n_both = 0;
        for (int i = 0; i < N_CHANNELS * N_ROWS; ++i) {
            n_used += is_large(own, i, layer, k);
            n_both += is_large(own, i, layer, k) && is_large(first, i, 0, k);
        }
        CHECK(used[k] == n * n_used && both[k] == n * n_both);
    }
    free(used);
    free(both);
}

static void test_values_are_compared_with_those_of_the_predictor(void) {
    struct ggml_context * ctx     = context_new();
    llmaas_overlap *      overlap = overlap_new();
    struct ggml_tensor *  first = random_rows(ctx, N_CHANNELS, N_ROWS), * third = random_rows(ctx, N_CHANNELS, N_ROWS),
                       *  fourth = random_rows(ctx, N_CHANNELS, N_ROWS);
    for (uint64_t n = 1; n <= 2; ++n) { /* two graphs */
        put_rows(overlap, 0, first);
        put_rows(overlap, 2, third);
        put_rows(overlap, 3, fourth);
        check_counted(overlap, 2, third, first, n);
        check_counted(overlap, 3, fourth, first, n);
    }
    check_counted(overlap, 0, first, first, 0); /* nothing predicts it */
    llmaas_overlap_free(overlap);
    ggml_free(ctx);
}

static void test_rows_that_the_predictor_does_not_have_are_not_counted(void) {
    struct ggml_context * ctx     = context_new();
    llmaas_overlap *      overlap = overlap_new();
    struct ggml_tensor *  first = random_rows(ctx, N_CHANNELS, N_ROWS), * third = random_rows(ctx, N_CHANNELS, N_ROWS);
    put_rows(overlap, 2, third); /* the first layer was not computed */
    check_counted(overlap, 2, third, first, 0);
    put_rows(overlap, 0, first);
    put_rows(overlap, 2, random_rows(ctx, N_CHANNELS, N_ROWS - 1));
    check_counted(overlap, 2, third, first, 0);
    put_rows(overlap, 2, random_rows(ctx, N_CHANNELS - 1, N_ROWS)); /* a level leaves channels out */
    check_counted(overlap, 2, third, first, 0);
    put_rows(overlap, 3, third); /* the last layer that the first one predicts */
    put_rows(overlap, 2, third); /* so its rows are gone */
    check_counted(overlap, 2, third, first, 0);
    put_rows(overlap, 0, random_rows(ctx, N_CHANNELS - 1, N_ROWS));
    put_rows(overlap, 2, third);
    check_counted(overlap, 2, third, first, 0);
    llmaas_overlap_free(overlap);
    ggml_free(ctx);
}

static llmaas_overlap * with_predictors(const int32_t * wrong) {
    return llmaas_overlap_new(LLMAAS_TAP_ATTN_INPUT, N_LAYERS, n_channels, wrong, N_THRESHOLDS, thresholds[0]);
}

static void test_overlap_arguments(void) {
    uint64_t used[N_THRESHOLDS], both[N_THRESHOLDS];
    CHECK(!with_predictors((const int32_t[]) {-1, -1, 2, 0})); /* itself */
    CHECK(!with_predictors((const int32_t[]) {-1, -1, 3, 0})); /* a later layer */
    CHECK(!with_predictors((const int32_t[]) {-1, -1, 1, 0})); /* a layer that is not counted */
    CHECK(!with_predictors(NULL));
    CHECK(!llmaas_overlap_new(LLMAAS_TAP_ATTENTION, N_LAYERS, n_channels, predictors, N_THRESHOLDS, thresholds[0]));
    CHECK(!llmaas_overlap_new(LLMAAS_TAP_ATTN_INPUT, 0, n_channels, predictors, N_THRESHOLDS, thresholds[0]));
    CHECK(!llmaas_overlap_new(LLMAAS_TAP_ATTN_INPUT, N_LAYERS, n_channels, predictors, 0, thresholds[0]));
    CHECK(!llmaas_overlap_new(LLMAAS_TAP_ATTN_INPUT, N_LAYERS, n_channels, predictors, 33, thresholds[0]));
    llmaas_overlap * overlap = overlap_new();
    CHECK(llmaas_overlap_read(overlap, 1, used, both) == LLMAAS_EINVAL);
    CHECK(llmaas_overlap_read(overlap, N_LAYERS, used, both) == LLMAAS_EINVAL);
    CHECK(llmaas_overlap_read(overlap, 0, NULL, both) == LLMAAS_EINVAL);
    CHECK(llmaas_overlap_read(overlap, 0, used, NULL) == LLMAAS_EINVAL);
    CHECK(llmaas_overlap_read(NULL, 0, used, both) == LLMAAS_EINVAL);
    llmaas_overlap_free(overlap);
    llmaas_overlap_free(NULL);
}

int main(void) {
    test_values_are_compared_with_those_of_the_predictor();
    test_rows_that_the_predictor_does_not_have_are_not_counted();
    test_overlap_arguments();
    return 0;
}
