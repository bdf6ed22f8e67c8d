/* The tap that counts magnitudes, compared with sums over the same values. */
#include "tap_threads.h"

#include <math.h>

enum { N_LAYERS = 3, LAYER = 1, N_CHANNELS = 37, N_ROWS = 20 };

static const uint32_t n_channels[N_LAYERS] = {0, N_CHANNELS, 8};

static llmaas_magnitudes * magnitudes_new(void) {
    llmaas_magnitudes * made = llmaas_magnitudes_new(LLMAAS_TAP_FFN_MIDDLE, N_LAYERS, n_channels);
    CHECK(made);
    return made;
}

/* Make values of any sign and of any exponent that does not overflow sums. */
static struct ggml_tensor * random_rows(struct ggml_context * ctx, int n, int n_rows) {
    struct ggml_tensor * rows = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, n_rows);
    for (int i = 0; i < n * n_rows; ++i) {
        ((float *) rows->data)[i] = (float) ldexp((double) rnd_below(1 << 24) / (1 << 23) - 1.0, (int) rnd_below(200) - 120);
    }
    return rows;
}

static void put_rows(llmaas_magnitudes * magnitudes, const struct ggml_tensor * rows) {
    const llmaas_tap_view view = {.kind = LLMAAS_TAP_FFN_MIDDLE, .layer = LAYER, .is_first = true, .states = rows};
    run_tap(llmaas_magnitudes_tap(magnitudes), &view, 1, 3);
}

/* Check that LAYER counted `weight` times these values, row after row. */
static void check_counted(llmaas_magnitudes * magnitudes, const float * values, int n_rows, int weight) {
    uint64_t * counts = (uint64_t *) (void *) exact(sizeof(uint64_t) * LLMAAS_MAGNITUDE_BUCKETS);
    double *   sums   = (double *) (void *) exact(sizeof(double) * N_CHANNELS);
    CHECK(llmaas_magnitudes_read(magnitudes, LAYER, counts, sums) == LLMAAS_OK);
    for (uint32_t bucket = 0; bucket < LLMAAS_MAGNITUDE_BUCKETS; ++bucket) {
        const uint32_t bits[2] = {bucket << 17, (bucket + 1) << 17};
        float          edges[2];
        memcpy(edges, bits, sizeof edges);
        uint64_t n = 0;
        for (int i = 0; i < n_rows * N_CHANNELS; ++i) {
            n += fabsf(values[i]) >= edges[0] && fabsf(values[i]) < edges[1];
        }
        CHECK(counts[bucket] == n * (uint64_t) weight);
    }
    for (int channel = 0; channel < N_CHANNELS; ++channel) {
        double sum = 0.0;
        for (int i = 0; i < n_rows * weight; ++i) {
            sum += (double) fabsf(values[i % n_rows * N_CHANNELS + channel]);
        }
        CHECK(sums[channel] == sum);
    }
    free(counts);
    free(sums);
}

static void test_magnitudes_are_counted_by_bucket_and_channel(void) {
    struct ggml_context * ctx        = context_new();
    llmaas_magnitudes *   magnitudes = magnitudes_new();
    struct ggml_tensor *  rows       = random_rows(ctx, N_CHANNELS, N_ROWS);
    check_counted(magnitudes, rows->data, 0, 1);
    put_rows(magnitudes, rows);
    check_counted(magnitudes, rows->data, N_ROWS, 1);
    put_rows(magnitudes, rows);
    check_counted(magnitudes, rows->data, N_ROWS, 2);
    put_rows(magnitudes, random_rows(ctx, N_CHANNELS + 1, N_ROWS)); /* wrong width */
    check_counted(magnitudes, rows->data, N_ROWS, 2);
    llmaas_magnitudes_free(magnitudes);
    ggml_free(ctx);
}

static void test_counted_rows_may_be_strided(void) {
    struct ggml_context * ctx        = context_new();
    llmaas_magnitudes *   magnitudes = magnitudes_new();
    struct ggml_tensor *  all        = random_rows(ctx, N_CHANNELS, 6);
    float                 odd[3 * N_CHANNELS];
    for (int i = 0; i < 3 * N_CHANNELS; ++i) {
        odd[i] = ((const float *) all->data)[(1 + 2 * (i / N_CHANNELS)) * N_CHANNELS + i % N_CHANNELS];
    }
    put_rows(magnitudes, ggml_view_3d(ctx, all, N_CHANNELS, 1, 3, all->nb[1], 2 * all->nb[1], all->nb[1]));
    check_counted(magnitudes, odd, 3, 1);
    llmaas_magnitudes_free(magnitudes);
    ggml_free(ctx);
}

static void test_what_is_not_finite_is_in_no_bucket(void) {
    struct ggml_context * ctx        = context_new();
    llmaas_magnitudes *   magnitudes = magnitudes_new();
    struct ggml_tensor *  rows       = random_rows(ctx, N_CHANNELS, 1);
    uint64_t              counts[LLMAAS_MAGNITUDE_BUCKETS], n = 0;
    double                sums[N_CHANNELS];
    const float           values[] = {0.0f, -0.0f, -INFINITY, NAN};
    memcpy(rows->data, values, sizeof values);
    put_rows(magnitudes, rows);
    CHECK(llmaas_magnitudes_read(magnitudes, LAYER, counts, sums) == LLMAAS_OK);
    for (int bucket = 0; bucket < LLMAAS_MAGNITUDE_BUCKETS; ++bucket) {
        n += counts[bucket];
    }
    CHECK(n == N_CHANNELS - 2 && counts[0] == 2);
    CHECK(sums[2] == (double) INFINITY && isnan(sums[3]) && isfinite(sums[4]));
    llmaas_magnitudes_free(magnitudes);
    ggml_free(ctx);
}

static void test_magnitudes_arguments(void) {
    uint64_t counts[LLMAAS_MAGNITUDE_BUCKETS];
    double   sums[N_CHANNELS];
    CHECK(!llmaas_magnitudes_new(LLMAAS_TAP_ATTENTION, N_LAYERS, n_channels));
    CHECK(!llmaas_magnitudes_new(LLMAAS_TAP_FINAL_NORM, N_LAYERS, n_channels));
    CHECK(!llmaas_magnitudes_new(LLMAAS_TAP_ATTN_INPUT, 0, n_channels));
    CHECK(!llmaas_magnitudes_new(LLMAAS_TAP_ATTN_INPUT, N_LAYERS, NULL));
    llmaas_magnitudes * magnitudes = magnitudes_new();
    const llmaas_tap    tap        = llmaas_magnitudes_tap(magnitudes);
    CHECK(tap.kind == LLMAAS_TAP_FFN_MIDDLE && tap.wants(tap.user, 1) && tap.wants(tap.user, 2));
    CHECK(!tap.wants(tap.user, -1) && !tap.wants(tap.user, 0) && !tap.wants(tap.user, 3));
    CHECK(llmaas_magnitudes_read(magnitudes, 0, counts, sums) == LLMAAS_EINVAL);
    CHECK(llmaas_magnitudes_read(magnitudes, N_LAYERS, counts, sums) == LLMAAS_EINVAL);
    CHECK(llmaas_magnitudes_read(magnitudes, LAYER, NULL, sums) == LLMAAS_EINVAL);
    CHECK(llmaas_magnitudes_read(magnitudes, LAYER, counts, NULL) == LLMAAS_EINVAL);
    llmaas_magnitudes_free(magnitudes);
    llmaas_magnitudes_free(NULL);
}

int main(void) {
    test_magnitudes_are_counted_by_bucket_and_channel();
    test_counted_rows_may_be_strided();
    test_what_is_not_finite_is_in_no_bucket();
    test_magnitudes_arguments();
    return 0;
}
