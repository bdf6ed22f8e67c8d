/* Overlap of activations: which large values of a layer are large in the layer that predicts it. A value takes 10 ns. */
#include "llmaas/tap.h"

#include "base/fork_lock.h"
#include "base/rows.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N_RANKS = LLMAAS_MAX_THRESHOLDS + 1 };

/* The rank of a value is how many of its layer's thresholds it reaches. */
typedef struct layer {
    uint32_t      n_channels; /* 0: not counted */
    int           predictor;  /* -1: none */
    int           last_user;  /* the last layer that this one predicts; -1: none */
    const float * thresholds;
    uint8_t *     ranks;      /* of the current graph's rows, until the last user has compared them */
    int64_t       n_rows;
    uint64_t      used[N_RANKS], both[N_RANKS]; /* compared values, by rank and by the lesser of both ranks */
} layer;

struct llmaas_overlap {
    llmaas_tap_kind  kind;
    int              n_layers;
    uint32_t         n_thresholds;
    float *          thresholds;
    layer *          layers;
    llmaas_fork_lock lock; /* guards the layers' ranks and counts */
};

/* -- creation and destruction ------------------------------------------------------------------------------------ */

static void free_parts(llmaas_overlap * overlap) {
    for (int i = 0; overlap->layers && i < overlap->n_layers; i++) {
        free(overlap->layers[i].ranks);
    }
    free(overlap->layers);
    free(overlap->thresholds);
    free(overlap);
}

/* Set what the layers are compared with. False if a predictor is no earlier layer of the same width. */
static bool set_layers(llmaas_overlap * overlap, const uint32_t * n_channels, const int32_t * predictors) {
    for (int i = 0; i < overlap->n_layers; i++) {
        const int predictor = n_channels[i] > 0 ? predictors[i] : -1;
        if (predictor >= i || (predictor >= 0 && n_channels[predictor] != n_channels[i])) {
            return false;
        }
        overlap->layers[i] = (layer) {
            .n_channels = n_channels[i],
            .predictor  = predictor,
            .last_user  = -1,
            .thresholds = overlap->thresholds + (size_t) i * overlap->n_thresholds,
        };
        if (predictor >= 0) {
            overlap->layers[predictor].last_user = i;
        }
    }
    return true;
}

llmaas_overlap * llmaas_overlap_new(
    llmaas_tap_kind kind, uint32_t n_layers, const uint32_t * n_channels, const int32_t * predictors, uint32_t n_thresholds,
    const float * thresholds) {
    if (kind == LLMAAS_TAP_ATTENTION || kind == LLMAAS_TAP_FINAL_NORM || !n_layers || n_layers > INT_MAX || !n_channels ||
        !predictors || !n_thresholds || n_thresholds > LLMAAS_MAX_THRESHOLDS || !thresholds) {
        return NULL;
    }
    llmaas_overlap * overlap = calloc(1, sizeof *overlap);
    if (!overlap) {
        return NULL;
    }
    const size_t n_bytes  = (size_t) n_layers * n_thresholds * sizeof *thresholds;
    overlap->kind         = kind;
    overlap->n_layers     = (int) n_layers;
    overlap->n_thresholds = n_thresholds;
    overlap->thresholds   = malloc(n_bytes);
    overlap->layers       = calloc(n_layers, sizeof *overlap->layers);
    if (!overlap->thresholds || !overlap->layers) {
        free_parts(overlap);
        return NULL;
    }
    memcpy(overlap->thresholds, thresholds, n_bytes);
    if (!set_layers(overlap, n_channels, predictors) || !llmaas_fork_lock_init(&overlap->lock, NULL)) {
        free_parts(overlap);
        return NULL;
    }
    return overlap;
}

void llmaas_overlap_free(llmaas_overlap * overlap) {
    if (overlap) {
        llmaas_fork_lock_destroy(&overlap->lock);
        free_parts(overlap);
    }
}

/* -- counting ---------------------------------------------------------------------------------------------------- */

static layer * layer_at(const llmaas_overlap * overlap, int i) {
    return i >= 0 && i < overlap->n_layers && overlap->layers[i].n_channels > 0 ? &overlap->layers[i] : NULL;
}

static uint8_t rank_of(float x, const float * thresholds, uint32_t n) {
    const float size = fabsf(x);
    uint32_t    rank = 0;
    for (uint32_t k = 0; k < n; k++) {
        rank += size >= thresholds[k] ? 1 : 0;
    }
    return (uint8_t) rank;
}

/* Rank a layer's rows. False if there is no memory for them. */
static bool rank_rows(const llmaas_overlap * overlap, layer * to, const struct ggml_tensor * from) {
    free(to->ranks);
    to->n_rows = ggml_nrows(from);
    to->ranks  = malloc((size_t) to->n_rows * to->n_channels);
    if (!to->ranks) {
        return false;
    }
    for (int64_t row = 0; row < to->n_rows; row++) {
        const float * values = (const float *) (const void *) llmaas_row(from, row);
        uint8_t *     ranks  = to->ranks + (size_t) row * to->n_channels;
        for (uint32_t i = 0; i < to->n_channels; i++) {
            ranks[i] = rank_of(values[i], to->thresholds, overlap->n_thresholds);
        }
    }
    return true;
}

/* Count the ranked values of a layer. Rows that the predictor does not have are not counted. */
static void compare(layer * counted, const layer * predictor) {
    if (!predictor->ranks || predictor->n_rows != counted->n_rows) {
        return;
    }
    const size_t n = (size_t) counted->n_rows * counted->n_channels;
    for (size_t i = 0; i < n; i++) {
        const uint8_t own = counted->ranks[i], other = predictor->ranks[i];
        counted->used[own]++;
        counted->both[own < other ? own : other]++;
    }
}

static void forget(layer * ranked) {
    free(ranked->ranks);
    ranked->ranks = NULL;
}

static bool wants(void * user, int i) { return layer_at(user, i) != NULL; }

static void run(void * user, const llmaas_tap_view * view, int ith, int nth) {
    (void) nth;
    llmaas_overlap *           overlap   = user;
    layer *                    counted   = layer_at(overlap, view->layer);
    layer *                    predictor = layer_at(overlap, counted->predictor);
    const struct ggml_tensor * from      = view->states;
    if (ith != 0 || from->type != GGML_TYPE_F32 || from->nb[0] != sizeof(float)) {
        return;
    }
    pthread_mutex_lock(&overlap->lock.mutex);
    if (from->ne[0] != counted->n_channels) {
        forget(counted); /* a level left out channels, so nothing is compared with these rows */
    } else if (rank_rows(overlap, counted, from) && predictor) {
        compare(counted, predictor);
    }
    if (predictor && predictor->last_user == view->layer) {
        forget(predictor);
    }
    if (counted->last_user < 0) {
        forget(counted);
    }
    pthread_mutex_unlock(&overlap->lock.mutex);
}

llmaas_tap llmaas_overlap_tap(llmaas_overlap * overlap) {
    return (llmaas_tap){.kind = overlap->kind, .user = overlap, .wants = wants, .run = run};
}

/* Write, for each threshold, how many values have a rank above its number. */
static void reach(const uint64_t * by_rank, uint32_t n_thresholds, uint64_t * counts) {
    uint64_t n = 0;
    for (uint32_t k = n_thresholds; k > 0; k--) {
        n += by_rank[k];
        counts[k - 1] = n;
    }
}

llmaas_status llmaas_overlap_read(llmaas_overlap * overlap, int i, uint64_t * used, uint64_t * both) {
    const layer * counted = overlap ? layer_at(overlap, i) : NULL;
    if (!counted || !used || !both) {
        return LLMAAS_EINVAL;
    }
    pthread_mutex_lock(&overlap->lock.mutex);
    reach(counted->used, overlap->n_thresholds, used);
    reach(counted->both, overlap->n_thresholds, both);
    pthread_mutex_unlock(&overlap->lock.mutex);
    return LLMAAS_OK;
}
