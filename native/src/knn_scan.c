/* The scan: products of whole numbers by a kernel, distances from them, and the best so far in a buffer. */
#include "knn_codes.h"

#include "../kernels/kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SCAN_ROWS = 64 }; /* a kernel's call: few enough that distances stay in the nearest cache */

/* Candidates are numbers that sort as their distances do, and among equals as their rows do. The buffer takes what is below
 * the threshold; when it is full, the n_best stay, and the last of them is the new threshold. */
typedef struct best {
    uint64_t all[2 * LLMAAS_KNN_MAX_BEST];
    uint32_t n;
    uint32_t n_best;
    float    threshold;
} best;

static uint32_t order_of(float distance) {
    uint32_t bits;
    memcpy(&bits, &distance, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static float distance_of(uint32_t order) {
    const uint32_t bits = order & 0x80000000u ? order & 0x7fffffffu : ~order;
    float distance;
    memcpy(&distance, &bits, sizeof distance);
    return distance;
}

static uint64_t middle(uint64_t a, uint64_t b, uint64_t c) {
    return a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
}

/* Reorder so that the n_best smallest come first (Hoare's selection). All numbers differ. */
static void select_best(uint64_t * all, uint32_t n, uint32_t n_best) {
    int64_t low = 0, high = (int64_t) n - 1;
    while (low < high) {
        const uint64_t pivot = middle(all[low], all[(low + high) / 2], all[high]);
        int64_t i = low, j = high;
        while (i <= j) {
            for (; all[i] < pivot; ++i) {}
            for (; all[j] > pivot; --j) {}
            if (i <= j) {
                const uint64_t swap = all[i];
                all[i++] = all[j];
                all[j--] = swap;
            }
        }
        if ((int64_t) n_best <= j) {
            high = j;
        } else if ((int64_t) n_best >= i) {
            low = i;
        } else {
            return;
        }
    }
}

/* all[n_best - 1] need not be the largest of the n_best. */
static uint64_t last_of(const uint64_t * all, uint32_t n) {
    uint64_t last = all[0];
    for (uint32_t i = 1; i < n; ++i) {
        last = all[i] > last ? all[i] : last;
    }
    return last;
}

static void best_take(best * b, float distance, uint64_t row) {
    b->all[b->n++] = (uint64_t) order_of(distance) << 32 | row;
    if (b->n == 2 * b->n_best) {
        select_best(b->all, b->n, b->n_best);
        b->n = b->n_best;
        b->threshold = distance_of((uint32_t) (last_of(b->all, b->n) >> 32));
    }
}

/* Rows come in rising order, so one exactly at the threshold has lost against those that are in the buffer. */
static void best_take_block(best * b, const float * distances, uint32_t n, uint64_t row) {
    uint32_t n_below = 0;
    for (uint32_t i = 0; i < n; ++i) {
        n_below += distances[i] < b->threshold;
    }
    for (uint32_t i = 0; n_below && i < n; ++i) {
        if (distances[i] < b->threshold) {
            best_take(b, distances[i], row + i);
        }
    }
}

typedef struct prepared {
    llmaas_knn_query whole;
    uint32_t offset; /* what the codes' zero adds to every product */
    float unit;      /* of whole.wide */
    float norm;      /* squared distance from the centre */
} prepared;

/* The unit is the smallest with which neither a number leaves 16 bits, nor any product of a row 32. */
static float unit_of(const float * query, const llmaas_knn_codes * codes) {
    double largest = 0, sum = 0;
    for (uint32_t d = 0; d < codes->n_dims; ++d) {
        const double size = fabs(((double) query[d] - (double) codes->centre[d]) * (double) codes->steps[d]);
        largest = size > largest ? size : largest;
        sum += size;
    }
    const double by_number = largest / LLMAAS_KNN_WIDEST, by_sum = sum / ((1 << 24) - (double) codes->n_dims);
    return (float) (by_number > by_sum ? by_number : by_sum);
}

static bool prepare(const llmaas_knn_codes * codes, const float * query, prepared * p) {
    double norm = 0;
    uint32_t sum = 0;
    p->unit = unit_of(query, codes);
    for (uint32_t d = 0; d < codes->n_dims; ++d) {
        const double centred = (double) query[d] - (double) codes->centre[d];
        norm += centred * centred;
    }
    if (!(norm < 1e37) || !isfinite(p->unit)) {
        return false;
    }
    memset(&p->whole, 0, sizeof p->whole);
    for (uint32_t d = 0; d < codes->n_dims && p->unit > 0; ++d) {
        const double centred = (double) query[d] - (double) codes->centre[d];
        long wide = lrint(centred * (double) codes->steps[d] / (double) p->unit);
        wide = wide > LLMAAS_KNN_WIDEST ? LLMAAS_KNN_WIDEST : wide < -LLMAAS_KNN_WIDEST ? -LLMAAS_KNN_WIDEST : wide;
        const long high = (wide + 0x8080) / 256 - 128;
        p->whole.wide[d] = (int16_t) wide;
        p->whole.high[d] = (int8_t) high;
        p->whole.low[d]  = (int8_t) (wide - 256 * high);
        sum += (uint32_t) wide;
    }
    p->offset = KNN_ZERO * sum;
    p->norm = (float) norm;
    return true;
}

static void scan_block(const llmaas_knn_codes * codes, const prepared * p, uint64_t row, uint32_t n, best * b) {
    uint32_t dots[SCAN_ROWS];
    float distances[SCAN_ROWS];
    llmaas_k()->knn_dots(codes->codes + row * codes->stride, codes->stride, n, &p->whole, dots);
    const float factor = -2 * p->unit;
    for (uint32_t i = 0; i < n; ++i) {
        const float product = (float) (int32_t) (dots[i] - p->offset) * codes->scales[row + i];
        distances[i] = factor * product + (codes->norms[row + i] + p->norm);
    }
    best_take_block(b, distances, n, row);
}

static int by_number(const void * a, const void * b) {
    uint64_t x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return x < y ? -1 : x > y;
}

static void best_give(best * b, int32_t * rows, float * distances, uint32_t * n_found) {
    if (b->n > b->n_best) {
        select_best(b->all, b->n, b->n_best);
    }
    *n_found = b->n < b->n_best ? b->n : b->n_best;
    qsort(b->all, *n_found, sizeof b->all[0], by_number);
    for (uint32_t i = 0; i < *n_found; ++i) {
        rows[i] = (int32_t) (uint32_t) b->all[i];
        distances[i] = distance_of((uint32_t) (b->all[i] >> 32));
    }
}

llmaas_status llmaas_knn_scan(const llmaas_knn_codes * codes, uint64_t first, uint64_t n, const float * query,
                              uint32_t n_best, int32_t * rows, float * distances, uint32_t * n_found) {
    if (!knn_codes_valid(codes, first, n) || !query || n_best == 0 || n_best > LLMAAS_KNN_MAX_BEST || !rows || !distances ||
        !n_found) {
        return LLMAAS_EINVAL;
    }
    prepared p;
    if (!prepare(codes, query, &p)) {
        return LLMAAS_EUNSUPPORTED;
    }
    best b;
    b.n = 0;
    b.n_best = n_best;
    b.threshold = INFINITY;
    for (uint64_t row = first; row < first + n; row += SCAN_ROWS) {
        scan_block(codes, &p, row, (uint32_t) (first + n - row < SCAN_ROWS ? first + n - row : SCAN_ROWS), &b);
    }
    best_give(&b, rows, distances, n_found);
    return LLMAAS_OK;
}
