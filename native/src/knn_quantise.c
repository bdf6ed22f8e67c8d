#include "knn_codes.h"

#include <math.h>
#include <string.h>

/* A key on its way to its code. */
typedef struct coding {
    float exact[LLMAAS_KNN_MAX_DIMS]; /* from the centre */
    float steps[LLMAAS_KNN_MAX_DIMS]; /* the same in units of the dimensions' steps; 0 where a dimension has none */
} coding;

/* False when a value is not finite, or the key cannot be squared. */
static bool centre_key(const llmaas_knn_codes * codes, const float * key, coding * c) {
    double sum = 0;
    for (uint32_t d = 0; d < codes->n_dims; ++d) {
        c->exact[d] = key[d] - codes->centre[d];
        c->steps[d] = codes->steps[d] > 0 ? c->exact[d] / codes->steps[d] : 0;
        sum += (double) c->exact[d] * (double) c->exact[d];
    }
    return sum < 1e37;
}

static float largest(const float * values, uint32_t n) {
    float most = 0;
    for (uint32_t i = 0; i < n; ++i) {
        const float size = fabsf(values[i]);
        most = size > most ? size : most;
    }
    return most;
}

/* |coded|² - |coded - key|², both from the centre. With it, the error of an approximate distance is proportional to that
 * distance's root: a key that equals the query is found at 0, whatever its coding lost. */
static double encode(const llmaas_knn_codes * codes, const coding * c, float scale, uint8_t * row) {
    double norm = 0;
    const float inverse = scale > 0 ? 1 / scale : 0;
    for (uint32_t d = 0; d < codes->n_dims; ++d) {
        const float code = c->steps[d] * inverse + 0x1.8p23f - 0x1.8p23f; /* rounded; at most 127 with no room for more */
        const float coded = codes->steps[d] * scale * code;
        norm += (double) c->exact[d] * (2 * (double) coded - (double) c->exact[d]);
        row[d] = (uint8_t) (KNN_ZERO + (int) code);
    }
    memset(row + codes->n_dims, KNN_ZERO, codes->stride - codes->n_dims);
    return norm;
}

static bool are_steps(const llmaas_knn_codes * codes) {
    for (uint32_t d = 0; d < codes->n_dims; ++d) {
        const float step = codes->steps[d];
        if (!isfinite(codes->centre[d]) || (step != 0 && !(step >= LLMAAS_KNN_MIN_STEP && step <= LLMAAS_KNN_MAX_STEP))) {
            return false;
        }
    }
    return true;
}

llmaas_status llmaas_knn_quantise(const llmaas_knn_codes * codes, uint64_t first, uint64_t n, const float * keys) {
    if (!knn_codes_valid(codes, first, n) || (!keys && n) || !are_steps(codes)) {
        return LLMAAS_EINVAL;
    }
    coding c;
    for (uint64_t row = first; row < first + n; ++row, keys += codes->n_dims) {
        if (!centre_key(codes, keys, &c)) {
            return LLMAAS_EUNSUPPORTED;
        }
        const float most = largest(c.steps, codes->n_dims), scale = most / (float) KNN_LARGEST;
        if (most > LLMAAS_KNN_MAX_STEP) {
            return LLMAAS_EUNSUPPORTED;
        }
        codes->scales[row] = scale < LLMAAS_KNN_MIN_STEP ? 0 : scale;
        codes->norms[row] = (float) encode(codes, &c, codes->scales[row], codes->codes + row * codes->stride);
    }
    return LLMAAS_OK;
}
