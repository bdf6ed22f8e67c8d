#include "knn_codes.h"

#include <math.h>
#include <string.h>

/* A key that is being coded. */
typedef struct coding {
    float exact[LLMAAS_KNN_MAX_DIMS]; /* relative to the center */
    float steps[LLMAAS_KNN_MAX_DIMS]; /* the same in units of the dimensions' steps; 0 where a dimension has none */
} coding;

/* Subtract the center from a key. False if a value is not finite, or the key is too large to be squared. */
static bool center_key(const llmaas_knn_codes * codes, const float * key, coding * c) {
    double sum = 0;
    for (uint32_t d = 0; d < codes->n_dims; ++d) {
        c->exact[d] = key[d] - codes->center[d];
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

typedef struct norms {
    double all; /* |coded|² - |coded - key|², both relative to the center */
    double rest; /* |coded|² over the dimensions that are not in front */
} norms;

/* Code a key and return its norms. With this norm, the error of an approximate distance is proportional to that
 * distance's square root. So a key that equals the query is found at 0, whatever its coding lost. */
static norms encode(const llmaas_knn_codes * codes, const coding * c, float scale, uint8_t * row) {
    norms n = {0, 0};
    const float inverse = scale > 0 ? 1 / scale : 0;
    for (uint32_t d = 0; d < codes->n_dims; ++d) {
        const float code = c->steps[d] * inverse + 0x1.8p23f - 0x1.8p23f; /* rounded; at most 127 without clamping */
        const double coded = (double) (codes->steps[d] * scale * code);
        n.all += (double) c->exact[d] * (2 * coded - (double) c->exact[d]);
        n.rest += d < codes->n_front ? 0 : coded * coded;
        row[d] = (uint8_t) (KNN_ZERO + (int) code);
    }
    memset(row + codes->n_dims, KNN_ZERO, knn_stride(codes) - codes->n_dims);
    return n;
}

static void place(const llmaas_knn_codes * codes, uint64_t row, const uint8_t * bytes, norms n) {
    const uint32_t n_rest = knn_n_rest(codes);
    memcpy(codes->front + row * codes->n_front, bytes, codes->n_front);
    codes->norms[row] = (float) n.all;
    if (n_rest) {
        memcpy(codes->rest + row * n_rest, bytes + codes->n_front, n_rest);
        codes->front_norms[row] = (float) (n.all - n.rest);
    }
}

static bool are_steps(const llmaas_knn_codes * codes) {
    for (uint32_t d = 0; d < codes->n_dims; ++d) {
        const float step = codes->steps[d];
        if (!isfinite(codes->center[d]) || (step != 0 && !(step >= LLMAAS_KNN_MIN_STEP && step <= LLMAAS_KNN_MAX_STEP))) {
            return false;
        }
    }
    return true;
}

llmaas_status llmaas_knn_quantize(const llmaas_knn_codes * codes, uint64_t first, uint64_t n, const float * keys) {
    if (!knn_codes_valid(codes, first, n) || (!keys && n) || !are_steps(codes)) {
        return LLMAAS_EINVAL;
    }
    coding c;
    for (uint64_t row = first; row < first + n; ++row, keys += codes->n_dims) {
        if (!center_key(codes, keys, &c)) {
            return LLMAAS_EUNSUPPORTED;
        }
        const float most = largest(c.steps, codes->n_dims), scale = most / (float) KNN_LARGEST;
        if (most > LLMAAS_KNN_MAX_STEP) {
            return LLMAAS_EUNSUPPORTED;
        }
        codes->scales[row] = scale < LLMAAS_KNN_MIN_STEP ? 0 : scale;
        uint8_t bytes[LLMAAS_KNN_MAX_DIMS];
        const norms n = encode(codes, &c, codes->scales[row], bytes);
        place(codes, row, bytes, n);
    }
    return LLMAAS_OK;
}
