/* Magnitudes of activations. A value takes 3 ns, so a token of a model of 7 G parameters takes 2 ms. */
#include "llmaas/tap.h"
#include "taps/accumulator.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKET_SHIFT = 17, INFINITE_BITS = 0x7F800000, MAGNITUDE_BITS = 0x7FFFFFFF };

_Static_assert(INFINITE_BITS >> BUCKET_SHIFT == LLMAAS_MAGNITUDE_BUCKETS, "a bucket for each finite magnitude");

struct llmaas_magnitudes {
    llmaas_accumulator accumulator; /* numbers: counts by bucket (exact integers below 2^53), then sums by channel */
};

static void count(llmaas_layer_sums * layer, const float * row, uint32_t n) {
    double * counts = layer->numbers, * sums = counts + LLMAAS_MAGNITUDE_BUCKETS;
    for (uint32_t i = 0; i < n; i++) {
        sums[i] += (double) fabsf(row[i]);
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, row + i, sizeof bits);
        bits &= MAGNITUDE_BITS;
        if (bits < INFINITE_BITS) {
            counts[bits >> BUCKET_SHIFT]++;
        }
    }
}

llmaas_magnitudes * llmaas_magnitudes_new(llmaas_tap_kind kind, uint32_t n_layers, const uint32_t * n_channels) {
    llmaas_magnitudes * magnitudes = calloc(1, sizeof *magnitudes);
    if (!magnitudes ||
        !llmaas_accumulator_init(&magnitudes->accumulator, kind, n_layers, n_channels, LLMAAS_MAGNITUDE_BUCKETS, 1)) {
        free(magnitudes);
        return NULL;
    }
    magnitudes->accumulator.count = count;
    return magnitudes;
}

void llmaas_magnitudes_free(llmaas_magnitudes * magnitudes) {
    if (magnitudes) {
        llmaas_accumulator_end(&magnitudes->accumulator);
        free(magnitudes);
    }
}

llmaas_tap llmaas_magnitudes_tap(llmaas_magnitudes * magnitudes) { return llmaas_accumulator_tap(&magnitudes->accumulator); }

llmaas_status llmaas_magnitudes_read(llmaas_magnitudes * magnitudes, int layer, uint64_t * counts, double * sums) {
    const llmaas_layer_sums * counted = magnitudes ? llmaas_accumulator_layer(&magnitudes->accumulator, layer) : NULL;
    if (!counted || !counts || !sums) {
        return LLMAAS_EINVAL;
    }
    pthread_mutex_lock(&magnitudes->accumulator.lock.mutex);
    for (int bucket = 0; bucket < LLMAAS_MAGNITUDE_BUCKETS; bucket++) {
        counts[bucket] = (uint64_t) counted->numbers[bucket];
    }
    memcpy(sums, counted->numbers + LLMAAS_MAGNITUDE_BUCKETS, sizeof *sums * counted->n_channels);
    pthread_mutex_unlock(&magnitudes->accumulator.lock.mutex);
    return LLMAAS_OK;
}
