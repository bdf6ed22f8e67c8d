/* Magnitudes of activations. Thread 0 counts a node's rows alone, under the mutex that read() holds: sums do not depend on
 * the number of threads then. A value takes 3 ns, which is 2 ms a token of a model of 7 G parameters. */
#include "llmaas/tap.h"
#include "rows.h"

#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKET_SHIFT = 17, INFINITE_BITS = 0x7F800000, MAGNITUDE_BITS = 0x7FFFFFFF };

_Static_assert(INFINITE_BITS >> BUCKET_SHIFT == LLMAAS_MAGNITUDE_BUCKETS, "a bucket for each finite magnitude");

/* What a layer's values come to. */
struct values {
    uint32_t n_channels;
    uint64_t counts[LLMAAS_MAGNITUDE_BUCKETS];
    double   sums[]; /* by channel */
};

struct llmaas_magnitudes {
    llmaas_tap_kind kind;
    int             n_layers;
    pthread_mutex_t mutex;    /* run() against read(); guards the values */
    struct values * layers[]; /* NULL: not counted */
};

static bool make_layers(llmaas_magnitudes * magnitudes, const uint32_t * n_channels) {
    for (int layer = 0; layer < magnitudes->n_layers; layer++) {
        if (n_channels[layer] > 0) {
            struct values * values = calloc(1, sizeof *values + sizeof(double) * n_channels[layer]);
            if (!values) {
                return false;
            }
            values->n_channels        = n_channels[layer];
            magnitudes->layers[layer] = values;
        }
    }
    return true;
}

static void free_layers(llmaas_magnitudes * magnitudes) {
    for (int layer = 0; layer < magnitudes->n_layers; layer++) {
        free(magnitudes->layers[layer]);
    }
    free(magnitudes);
}

llmaas_magnitudes * llmaas_magnitudes_new(llmaas_tap_kind kind, uint32_t n_layers, const uint32_t * n_channels) {
    if (kind == LLMAAS_TAP_ATTENTION || kind == LLMAAS_TAP_FINAL_NORM || !n_layers || n_layers > INT_MAX || !n_channels) {
        return NULL;
    }
    llmaas_magnitudes * magnitudes = calloc(1, sizeof *magnitudes + sizeof(struct values *) * n_layers);
    if (!magnitudes) {
        return NULL;
    }
    magnitudes->kind     = kind;
    magnitudes->n_layers = (int) n_layers;
    if (!make_layers(magnitudes, n_channels) || pthread_mutex_init(&magnitudes->mutex, NULL)) {
        free_layers(magnitudes);
        return NULL;
    }
    return magnitudes;
}

void llmaas_magnitudes_free(llmaas_magnitudes * magnitudes) {
    if (magnitudes) {
        pthread_mutex_destroy(&magnitudes->mutex);
        free_layers(magnitudes);
    }
}

static struct values * values_of(const llmaas_magnitudes * magnitudes, int layer) {
    return layer >= 0 && layer < magnitudes->n_layers ? magnitudes->layers[layer] : NULL;
}

static bool wants(void * user, int layer) { return values_of(user, layer) != NULL; }

static void count(struct values * values, const float * row) {
    for (uint32_t i = 0; i < values->n_channels; i++) {
        values->sums[i] += (double) fabsf(row[i]);
    }
    for (uint32_t i = 0; i < values->n_channels; i++) {
        uint32_t bits;
        memcpy(&bits, row + i, sizeof bits);
        bits &= MAGNITUDE_BITS;
        if (bits < INFINITE_BITS) {
            values->counts[bits >> BUCKET_SHIFT]++;
        }
    }
}

static void run(void * user, const llmaas_tap_view * view, int ith, int nth) {
    (void) nth;
    llmaas_magnitudes *        magnitudes = user;
    struct values *            values     = values_of(magnitudes, view->layer);
    const struct ggml_tensor * from       = view->states;
    if (ith == 0 && from->type == GGML_TYPE_F32 && from->ne[0] == values->n_channels && from->nb[0] == sizeof(float)) {
        pthread_mutex_lock(&magnitudes->mutex);
        for (int64_t row = 0; row < ggml_nrows(from); row++) {
            count(values, (const float *) (const void *) llmaas_row(from, row));
        }
        pthread_mutex_unlock(&magnitudes->mutex);
    }
}

llmaas_tap llmaas_magnitudes_tap(llmaas_magnitudes * magnitudes) {
    return (llmaas_tap){.kind = magnitudes->kind, .user = magnitudes, .wants = wants, .run = run};
}

llmaas_status llmaas_magnitudes_read(llmaas_magnitudes * magnitudes, int layer, uint64_t * counts, double * sums) {
    const struct values * values = magnitudes ? values_of(magnitudes, layer) : NULL;
    if (!values || !counts || !sums) {
        return LLMAAS_EINVAL;
    }
    pthread_mutex_lock(&magnitudes->mutex);
    memcpy(counts, values->counts, sizeof values->counts);
    memcpy(sums, values->sums, sizeof *sums * values->n_channels);
    pthread_mutex_unlock(&magnitudes->mutex);
    return LLMAAS_OK;
}
