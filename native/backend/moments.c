/* Moments of activations: sums and sums of squares by channel. A value takes 1 ns. */
#include "llmaas/tap.h"
#include "tally.h"

#include <stdlib.h>
#include <string.h>

struct llmaas_moments {
    llmaas_tally tally; /* numbers: the sums, then the sums of squares */
};

static void count(llmaas_tallied * layer, const float * row, uint32_t n) {
    double * sums = layer->numbers, * squares = sums + layer->n_channels;
    for (uint32_t i = 0; i < n; i++) {
        const double value = (double) row[i];
        sums[i] += value;
        squares[i] += value * value;
    }
}

llmaas_moments * llmaas_moments_new(llmaas_tap_kind kind, uint32_t n_layers, const uint32_t * n_channels) {
    llmaas_moments * moments = calloc(1, sizeof *moments);
    if (!moments || !llmaas_tally_init(&moments->tally, kind, n_layers, n_channels, 0, 2)) {
        free(moments);
        return NULL;
    }
    moments->tally.count = count;
    return moments;
}

void llmaas_moments_free(llmaas_moments * moments) {
    if (moments) {
        llmaas_tally_end(&moments->tally);
        free(moments);
    }
}

llmaas_tap llmaas_moments_tap(llmaas_moments * moments) { return llmaas_tally_tap(&moments->tally); }

llmaas_status llmaas_moments_read(
    llmaas_moments * moments, int layer, uint64_t * n_rows, double * sums, double * squares) {
    const llmaas_tallied * counted = moments ? llmaas_tally_layer(&moments->tally, layer) : NULL;
    if (!counted || !n_rows || !sums || !squares) {
        return LLMAAS_EINVAL;
    }
    const size_t n = counted->n_channels;
    pthread_mutex_lock(&moments->tally.lock.mutex);
    *n_rows = counted->n_rows;
    memcpy(sums, counted->numbers, sizeof *sums * n);
    memcpy(squares, counted->numbers + n, sizeof *squares * n);
    pthread_mutex_unlock(&moments->tally.lock.mutex);
    return LLMAAS_OK;
}
