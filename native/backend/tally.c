#include "tally.h"

#include "rows.h"

#include <limits.h>
#include <stdlib.h>

static void free_layers(llmaas_tally * tally) {
    for (int layer = 0; tally->layers && layer < tally->n_layers; layer++) {
        free(tally->layers[layer]);
    }
    free(tally->layers);
}

static bool make_layers(llmaas_tally * tally, const uint32_t * n_channels, size_t n_fixed, size_t n_each) {
    tally->layers = calloc((size_t) tally->n_layers, sizeof *tally->layers);
    for (int layer = 0; tally->layers && layer < tally->n_layers; layer++) {
        if (n_channels[layer] > 0) {
            llmaas_tallied * made = calloc(1, sizeof *made + sizeof(double) * (n_fixed + n_each * n_channels[layer]));
            if (!made) {
                return false;
            }
            made->n_channels     = n_channels[layer];
            tally->layers[layer] = made;
        }
    }
    return tally->layers != NULL;
}

bool llmaas_tally_init(
    llmaas_tally * tally, llmaas_tap_kind kind, uint32_t n_layers, const uint32_t * n_channels, size_t n_fixed,
    size_t n_each) {
    if (kind == LLMAAS_TAP_ATTENTION || kind == LLMAAS_TAP_FINAL_NORM || !n_layers || n_layers > INT_MAX || !n_channels) {
        return false;
    }
    tally->kind     = kind;
    tally->n_layers = (int) n_layers;
    if (!make_layers(tally, n_channels, n_fixed, n_each) || !llmaas_fork_lock_init(&tally->lock, NULL)) {
        free_layers(tally);
        return false;
    }
    return true;
}

void llmaas_tally_end(llmaas_tally * tally) {
    llmaas_fork_lock_destroy(&tally->lock);
    free_layers(tally);
}

llmaas_tallied * llmaas_tally_layer(const llmaas_tally * tally, int layer) {
    return layer >= 0 && layer < tally->n_layers ? tally->layers[layer] : NULL;
}

static bool wants(void * user, int layer) { return llmaas_tally_layer(user, layer) != NULL; }

static void run(void * user, const llmaas_tap_view * view, int ith, int nth) {
    (void) nth;
    llmaas_tally *             tally = user;
    llmaas_tallied *           layer = llmaas_tally_layer(tally, view->layer);
    const struct ggml_tensor * from  = view->states;
    if (ith == 0 && from->type == GGML_TYPE_F32 && from->ne[0] <= layer->n_channels && from->nb[0] == sizeof(float)) {
        pthread_mutex_lock(&tally->lock.mutex);
        for (int64_t row = 0; row < ggml_nrows(from); row++) {
            tally->count(layer, (const float *) (const void *) llmaas_row(from, row), (uint32_t) from->ne[0]);
            layer->n_rows++;
        }
        pthread_mutex_unlock(&tally->lock.mutex);
    }
}

llmaas_tap llmaas_tally_tap(llmaas_tally * tally) {
    return (llmaas_tap){.kind = tally->kind, .user = tally, .wants = wants, .run = run};
}
