/* Moments of activations: sums and sums of squares by channel. A value takes 1 ns. */
#include "llmaas/tap.h"
#include "taps/accumulator.h"

#include <stdlib.h>
#include <string.h>

struct llmaas_moments {
    llmaas_accumulator accumulator; /* numbers: the sums, then the sums of squares */
};

static void count(llmaas_layer_sums * layer, const float * row, uint32_t n) {
    double * sums = layer->numbers, * squares = sums + layer->n_channels;
    for (uint32_t i = 0; i < n; i++) {
        const double value = (double) row[i];
        sums[i] += value;
        squares[i] += value * value;
    }
}

llmaas_moments * llmaas_moments_new(llmaas_tap_kind kind, uint32_t n_layers, const uint32_t * n_channels) {
    llmaas_moments * moments = calloc(1, sizeof *moments);
    if (!moments || !llmaas_accumulator_init(&moments->accumulator, kind, n_layers, n_channels, 0, 2)) {
        free(moments);
        return NULL;
    }
    moments->accumulator.count = count;
    return moments;
}

void llmaas_moments_free(llmaas_moments * moments) {
    if (moments) {
        llmaas_accumulator_end(&moments->accumulator);
        free(moments);
    }
}

llmaas_tap llmaas_moments_tap(llmaas_moments * moments) { return llmaas_accumulator_tap(&moments->accumulator); }

llmaas_status llmaas_moments_read(
    llmaas_moments * moments, int layer, uint64_t * n_rows, double * sums, double * squares) {
    const llmaas_layer_sums * counted = moments ? llmaas_accumulator_layer(&moments->accumulator, layer) : NULL;
    if (!counted || !n_rows || !sums || !squares) {
        return LLMAAS_EINVAL;
    }
    const size_t n = counted->n_channels;
    pthread_mutex_lock(&moments->accumulator.lock.mutex);
    *n_rows = counted->n_rows;
    memcpy(sums, counted->numbers, sizeof *sums * n);
    memcpy(squares, counted->numbers + n, sizeof *squares * n);
    pthread_mutex_unlock(&moments->accumulator.lock.mutex);
    return LLMAAS_OK;
}
