#include "taps/accumulator.h"

#include "base/rows.h"

#include <limits.h>
#include <stdlib.h>

static void free_layers(llmaas_accumulator * accumulator) {
    for (int layer = 0; accumulator->layers && layer < accumulator->n_layers; layer++) {
        free(accumulator->layers[layer]);
    }
    free(accumulator->layers);
}

static bool make_layers(llmaas_accumulator * accumulator, const uint32_t * n_channels, size_t n_fixed, size_t n_each) {
    accumulator->layers = calloc((size_t) accumulator->n_layers, sizeof *accumulator->layers);
    for (int layer = 0; accumulator->layers && layer < accumulator->n_layers; layer++) {
        if (n_channels[layer] > 0) {
            llmaas_layer_sums * made = calloc(1, sizeof *made + sizeof(double) * (n_fixed + n_each * n_channels[layer]));
            if (!made) {
                return false;
            }
            made->n_channels     = n_channels[layer];
            accumulator->layers[layer] = made;
        }
    }
    return accumulator->layers != NULL;
}

bool llmaas_accumulator_init(
    llmaas_accumulator * accumulator, llmaas_tap_kind kind, uint32_t n_layers, const uint32_t * n_channels, size_t n_fixed,
    size_t n_each) {
    if (kind == LLMAAS_TAP_ATTENTION || kind == LLMAAS_TAP_FINAL_NORM || !n_layers || n_layers > INT_MAX || !n_channels) {
        return false;
    }
    accumulator->kind     = kind;
    accumulator->n_layers = (int) n_layers;
    if (!make_layers(accumulator, n_channels, n_fixed, n_each) || !llmaas_fork_lock_init(&accumulator->lock, NULL)) {
        free_layers(accumulator);
        return false;
    }
    return true;
}

void llmaas_accumulator_end(llmaas_accumulator * accumulator) {
    llmaas_fork_lock_destroy(&accumulator->lock);
    free_layers(accumulator);
}

llmaas_layer_sums * llmaas_accumulator_layer(const llmaas_accumulator * accumulator, int layer) {
    return layer >= 0 && layer < accumulator->n_layers ? accumulator->layers[layer] : NULL;
}

static bool wants(void * user, int layer) { return llmaas_accumulator_layer(user, layer) != NULL; }

static void run(void * user, const llmaas_tap_view * view, int ith, int nth) {
    (void) nth;
    llmaas_accumulator *             accumulator = user;
    llmaas_layer_sums *           layer = llmaas_accumulator_layer(accumulator, view->layer);
    const struct ggml_tensor * from  = view->states;
    if (ith == 0 && from->type == GGML_TYPE_F32 && from->ne[0] <= layer->n_channels && from->nb[0] == sizeof(float)) {
        pthread_mutex_lock(&accumulator->lock.mutex);
        for (int64_t row = 0; row < ggml_nrows(from); row++) {
            accumulator->count(layer, (const float *) (const void *) llmaas_row(from, row), (uint32_t) from->ne[0]);
            layer->n_rows++;
        }
        pthread_mutex_unlock(&accumulator->lock.mutex);
    }
}

llmaas_tap llmaas_accumulator_tap(llmaas_accumulator * accumulator) {
    return (llmaas_tap){.kind = accumulator->kind, .user = accumulator, .wants = wants, .run = run};
}
