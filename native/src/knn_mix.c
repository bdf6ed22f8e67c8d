/* Mixing works on logarithms. With Z = sum of exp(logit) and odds = w / (1 - w), a token's new logit is log(exp(logit)
 * + odds × Z × p_kNN). Shifting all logits does not change the result. */
#include "llmaas/knn.h"

#include "../kernels/kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { FEWEST = 16 }; /* fewest logits that a kernel takes */

#define W_MAX (1 - 0x1p-20)

typedef struct share {
    int32_t value;
    double  weight;
} share;

static int by_value(const void * a, const void * b) {
    const share * x = a, * y = b;
    return (x->value > y->value) - (x->value < y->value);
}

llmaas_status llmaas_logits_peek(const float * logits, uint32_t n_vocab, llmaas_logits_info * info) {
    if (!logits || !info || n_vocab == 0) {
        return LLMAAS_EINVAL;
    }
    float few[FEWEST];
    for (uint32_t i = 0; n_vocab < FEWEST && i < FEWEST; ++i) {
        few[i] = i < n_vocab ? logits[i] : -INFINITY;
    }
    logits = n_vocab < FEWEST ? few : logits;
    const size_t n = n_vocab < FEWEST ? FEWEST : n_vocab;
    int is_nan = 0;
    const float max = llmaas_k()->logits_max(logits, n, &is_nan);
    if (is_nan || !isfinite(max)) {
        return LLMAAS_EUNSUPPORTED;
    }
    const double sum = llmaas_k()->logits_sum(logits, n, max);
    info->log_sum_exp = (float) ((double) max + log(sum));
    info->max_prob = (float) (1 / sum);
    return LLMAAS_OK;
}

static bool is_share(float x) { return x >= 0 && x <= 1; }

static bool are_neighbors(const int32_t * values, const float * distances, uint32_t k, uint32_t n_vocab) {
    for (uint32_t i = 0; i < k; ++i) {
        if (values[i] < 0 || (uint32_t) values[i] >= n_vocab || !isfinite(distances[i])) {
            return false;
        }
    }
    return true;
}

static float nearest_of(const float * distances, uint32_t k) {
    float nearest = INFINITY;
    for (uint32_t i = 0; i < k; ++i) {
        nearest = distances[i] < nearest ? distances[i] : nearest;
    }
    return nearest;
}

/* Compute a share for each token among the neighbors, and return the sum of the shares. Distances are relative to the
 * nearest neighbor; otherwise exp could underflow for all of them. */
static double gather(const int32_t * values, const float * distances, uint32_t k, float nearest, double theta,
                     share * shares, uint32_t * n) {
    double sum = 0;
    for (uint32_t i = 0; i < k; ++i) {
        shares[i] = (share) {values[i], exp(((double) nearest - (double) distances[i]) / theta)};
        sum += shares[i].weight;
    }
    qsort(shares, k, sizeof *shares, by_value);
    *n = 0;
    for (uint32_t i = 0; i < k; ++i) {
        if (*n && shares[*n - 1].value == shares[i].value) {
            shares[*n - 1].weight += shares[i].weight;
        } else {
            shares[(*n)++] = shares[i];
        }
    }
    return sum;
}

static float log_add(double a, double b) {
    return (float) (a > b ? a + log1p(exp(b - a)) : b + log1p(exp(a - b)));
}

llmaas_status llmaas_logits_mix(float * logits, uint32_t n_vocab, const int32_t * values, const float * distances,
                                uint32_t k, float alpha, float beta, float theta, float far,
                                llmaas_logits_info * info) {
    if (k > LLMAAS_KNN_MAX_BEST || (k && (!values || !distances)) || !is_share(alpha) || !is_share(beta) || !(theta > 0) ||
        !isfinite(theta) || !(far > -INFINITY) || !are_neighbors(values, distances, k, n_vocab)) {
        return LLMAAS_EINVAL;
    }
    const llmaas_status status = llmaas_logits_peek(logits, n_vocab, info);
    if (status != LLMAAS_OK) {
        return status;
    }
    if (k == 0) {
        return LLMAAS_OK;
    }
    share shares[LLMAAS_KNN_MAX_BEST];
    uint32_t n;
    const float  nearest = nearest_of(distances, k);
    const double sum     = gather(values, distances, k, nearest, (double) theta, shares, &n);
    const double others  = exp(((double) nearest - (double) far) / (double) theta); /* 0 if far is infinite */
    const double wanted  = (double) alpha * (1 - (double) beta * (double) info->max_prob) * (sum / (sum + others));
    const double w       = wanted < W_MAX ? wanted : W_MAX;
    if (!(w > 0)) {
        return LLMAAS_OK;
    }
    const double base = (double) info->log_sum_exp + log(w / (1 - w) / sum);
    for (uint32_t i = 0; i < n; ++i) {
        float * logit = &logits[shares[i].value];
        if (shares[i].weight > 0 && *logit > -INFINITY) {
            *logit = log_add((double) *logit, base + log(shares[i].weight));
        }
    }
    return LLMAAS_OK;
}
