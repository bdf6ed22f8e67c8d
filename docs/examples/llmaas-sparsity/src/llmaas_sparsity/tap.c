/* How many of the values that feed-forward blocks read are near zero.
 *
 * run() is called by all threads of a graph at once and must not wait for any of them, so they share out the rows, and
 * each adds what it found to the layer's counters. */
#include "llmaas/tap.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

typedef struct layer {
    _Atomic uint64_t n_small;
    _Atomic uint64_t n_all;
} layer;

typedef struct sparsity {
    llmaas_tap tap;
    float      threshold;
    int        n_layer;
    layer      layers[];
} sparsity;

static uint64_t count_small(const float * values, int64_t n, float threshold) {
    float    largest = 0.0f;
    uint64_t n_small = 0;
    for (int64_t i = 0; i < n; i++) {
        largest = fmaxf(largest, fabsf(values[i]));
    }
    for (int64_t i = 0; i < n; i++) {
        n_small += fabsf(values[i]) <= threshold * largest;
    }
    return n_small;
}

static void run(void * user, const llmaas_tap_view * view, int ith, int nth) {
    sparsity *                 s      = user;
    const struct ggml_tensor * x      = view->states; /* [n_embd, n_rows], for a mixture of experts [n_embd, 1, n_rows] */
    const size_t               stride = x->ne[2] > 1 ? x->nb[2] : x->nb[1];
    uint64_t                   n_small = 0, n_all = 0;
    if (view->layer >= s->n_layer) {
        return;
    }
    for (int64_t row = ith; row < x->ne[1] * x->ne[2]; row += nth) {
        n_small += count_small((const float *) ((const char *) x->data + (size_t) row * stride), x->ne[0], s->threshold);
        n_all += (uint64_t) x->ne[0];
    }
    s->layers[view->layer].n_all += n_all; /* first, and read last: a share is never above 1 */
    s->layers[view->layer].n_small += n_small;
}

static sparsity * sparsity_new(int n_layer, float threshold) {
    sparsity * s = calloc(1, sizeof *s + (size_t) n_layer * sizeof *s->layers);
    if (s) {
        s->tap       = (llmaas_tap) {.kind = LLMAAS_TAP_FFN_INPUT, .user = s, .run = run};
        s->threshold = threshold;
        s->n_layer   = n_layer;
    }
    return s;
}

static void * sparsity_tap(sparsity * s) { return &s->tap; }

static void sparsity_read(const sparsity * s, int i, uint64_t * n_small, uint64_t * n_all) {
    *n_small = s->layers[i].n_small;
    *n_all   = s->layers[i].n_all;
}

static void sparsity_free(sparsity * s) { free(s); }
