/* The tap that adds up values and their squares, compared with sums over the same values. */
#include "tap_threads.h"

enum { N_LAYERS = 3, LAYER = 1, N_CHANNELS = 37, N_ROWS = 20 };

static const uint32_t n_channels[N_LAYERS] = {0, N_CHANNELS, 8};

static llmaas_moments * moments_new(void) {
    llmaas_moments * made = llmaas_moments_new(LLMAAS_TAP_FFN_MIDDLE, N_LAYERS, n_channels);
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

static void put_rows(llmaas_moments * moments, const struct ggml_tensor * rows) {
    const llmaas_tap_view view = {.kind = LLMAAS_TAP_FFN_MIDDLE, .layer = LAYER, .is_first = true, .states = rows};
    run_tap(llmaas_moments_tap(moments), &view, 1, 3);
}

/* Check that LAYER counted all rows of `wide`, then those of `narrow` (may be NULL), padded with zeros. */
static void check_counted(llmaas_moments * moments, const struct ggml_tensor * wide, const struct ggml_tensor * narrow) {
    const struct ggml_tensor * const counted[2] = {wide, narrow};
    double * const sums    = (double *) (void *) exact(N_CHANNELS * sizeof(double));
    double * const squares = (double *) (void *) exact(N_CHANNELS * sizeof(double));
    uint64_t       n_rows = 0, n_expected = 0;
    CHECK(llmaas_moments_read(moments, LAYER, &n_rows, sums, squares) == LLMAAS_OK);
    for (int channel = 0; channel < N_CHANNELS; ++channel) {
        double sum = 0.0, square = 0.0;
        n_expected = 0;
        for (int i = 0; i < 2 && counted[i]; ++i) {
            for (int row = 0; row < counted[i]->ne[1]; ++row, ++n_expected) {
                if (channel < counted[i]->ne[0]) {
                    const double value = (double) ((const float *) counted[i]->data)[row * counted[i]->ne[0] + channel];
                    sum += value;
                    square += value * value;
                }
            }
        }
        CHECK(sums[channel] == sum && squares[channel] == square);
    }
    CHECK(n_rows == n_expected);
    free(sums);
    free(squares);
}

static void test_values_and_squares_are_added_up_by_channel(void) {
    struct ggml_context * ctx     = context_new();
    llmaas_moments *      moments = moments_new();
    struct ggml_tensor *  wide    = random_rows(ctx, N_CHANNELS, N_ROWS);
    struct ggml_tensor *  narrow  = random_rows(ctx, N_CHANNELS - 8, 3);
    put_rows(moments, wide);
    check_counted(moments, wide, NULL);
    put_rows(moments, narrow); /* a level leaves channels out */
    check_counted(moments, wide, narrow);
    put_rows(moments, random_rows(ctx, N_CHANNELS + 1, N_ROWS)); /* wrong width */
    check_counted(moments, wide, narrow);
    llmaas_moments_free(moments);
    ggml_free(ctx);
}

static void test_moments_arguments(void) {
    uint64_t n_rows;
    double   sums[N_CHANNELS], squares[N_CHANNELS];
    CHECK(!llmaas_moments_new(LLMAAS_TAP_ATTENTION, N_LAYERS, n_channels));
    llmaas_moments * moments = moments_new();
    CHECK(llmaas_moments_read(moments, 0, &n_rows, sums, squares) == LLMAAS_EINVAL);
    CHECK(llmaas_moments_read(moments, LAYER, NULL, sums, squares) == LLMAAS_EINVAL);
    CHECK(llmaas_moments_read(moments, LAYER, &n_rows, NULL, squares) == LLMAAS_EINVAL);
    CHECK(llmaas_moments_read(moments, LAYER, &n_rows, sums, NULL) == LLMAAS_EINVAL);
    llmaas_moments_free(moments);
    llmaas_moments_free(NULL);
}

int main(void) {
    test_values_and_squares_are_added_up_by_channel();
    test_moments_arguments();
    return 0;
}
