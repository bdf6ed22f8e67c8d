/* The scan. A kernel computes integer products; distances follow from them, and a buffer keeps the best rows so far. If
 * codes are in two parts, the distance over the front dimensions is a lower bound of the whole distance. */
#include "knn_best.h"
#include "knn_codes.h"

#include "../kernels/kernels.h"

#include <math.h>
#include <string.h>

enum {
    SCAN_ROWS  = 256, /* rows per kernel call: few enough that their distances stay in the first-level cache */
    SCAN_MANY  = 64,  /* from this many near rows on, a block of SCAN_ROWS is computed as a whole */
    SCAN_FEW   = 256, /* single rows that are collected before they are computed */
    SCAN_AHEAD = 8,   /* how many of those rows ahead to prefetch */
};

typedef struct prepared {
    llmaas_knn_query front, rest;
    uint32_t front_offset, rest_offset; /* what the codes' zero adds to every product */
    float unit;       /* of the query's numbers */
    float norm;       /* squared distance from the center */
    float front_norm; /* norm minus the most that the other dimensions can subtract from a distance */
} prepared;

/* Return the smallest unit with which each number fits into 16 bits and each product of a row into 32. */
static float unit_of(const float * query, const llmaas_knn_codes * codes) {
    double largest = 0, sum = 0;
    for (uint32_t d = 0; d < codes->n_dims; ++d) {
        const double size = fabs(((double) query[d] - (double) codes->center[d]) * (double) codes->steps[d]);
        largest = size > largest ? size : largest;
        sum += size;
    }
    const double by_number = largest / LLMAAS_KNN_WIDEST, by_sum = sum / ((1 << 24) - (double) codes->n_dims);
    return (float) (by_number > by_sum ? by_number : by_sum);
}

/* Store one number of the query. Return what the codes' zero adds to products. */
static uint32_t put(llmaas_knn_query * query, uint32_t at, double value) {
    const double limit = LLMAAS_KNN_WIDEST;
    const long wide = lrint(value > limit ? limit : value < -limit ? -limit : value), high = (wide + 0x8080) / 256 - 128;
    query->wide[at] = (int16_t) wide;
    query->high[at] = (int8_t) high;
    query->low[at]  = (int8_t) (wide - 256 * high);
    return KNN_ZERO * (uint32_t) wide;
}

/* Return the square of a dimension's number as products see it: rounded to a whole number of units. */
static double rounded_square(const prepared * p, const llmaas_knn_query * query, uint32_t at, float step) {
    const double rounded = step > 0 ? (double) query->wide[at] * (double) p->unit / (double) step : 0;
    return rounded * rounded;
}

/* Prepare a query. Let q be the query's numbers, r the rounded ones and k a row's. The dimensions that are not in front
 * add |q|² - 2 r·k + |k|² = |r - k|² + |q|² - |r|² to a distance: at least |q|² - |r|². front_norm contains that lower
 * bound. So no row's whole distance is less than its distance in front, however coarse a unit one large dimension
 * requires. */
static bool prepare(const llmaas_knn_codes * codes, const float * query, prepared * p) {
    double norm = 0, rest = 0;
    memset(p, 0, sizeof *p);
    p->unit = unit_of(query, codes);
    for (uint32_t d = 0; d < codes->n_dims; ++d) {
        const double centered = (double) query[d] - (double) codes->center[d];
        const double value = p->unit > 0 ? centered * (double) codes->steps[d] / (double) p->unit : 0;
        norm += centered * centered;
        if (!(norm < 1e37) || !isfinite(p->unit)) {
            return false;
        }
        if (d < codes->n_front) {
            p->front_offset += put(&p->front, d, value);
        } else {
            p->rest_offset += put(&p->rest, d - codes->n_front, value);
            rest += rounded_square(p, &p->rest, d - codes->n_front, codes->steps[d]);
        }
    }
    p->norm = (float) norm;
    p->front_norm = (float) (norm - rest);
    return true;
}

/* A range of rows. fronts: products of their front dimensions, once known. */
typedef struct range {
    const llmaas_knn_codes * codes;
    const prepared * p;
    uint64_t first, n;
    uint32_t * fronts;
} range;

static void front_dots(const range * r, uint64_t i, uint32_t n, uint32_t * dots) {
    const uint32_t n_front = r->codes->n_front;
    llmaas_k()->knn_dots(r->codes->front + (r->first + i) * n_front, n_front, n, &r->p->front, dots);
    for (uint32_t j = 0; j < n; ++j) {
        dots[j] -= r->p->front_offset;
    }
}

/* Compute the products of all dimensions: those of the rest plus those in front. */
static void rest_dots(const range * r, uint64_t i, uint32_t n, uint32_t * dots) {
    const uint32_t n_rest = knn_n_rest(r->codes);
    llmaas_k()->knn_dots(r->codes->rest + (r->first + i) * n_rest, n_rest, n, &r->p->rest, dots);
    for (uint32_t j = 0; j < n; ++j) {
        dots[j] += r->fronts[i + j] - r->p->rest_offset;
    }
}

static void distances_of(const range * r, const float * norms, float norm, uint64_t i, uint32_t n, const uint32_t * dots,
                         float * distances) {
    const float * scales = r->codes->scales + r->first + i;
    for (uint32_t j = 0; j < n; ++j) {
        distances[j] = -2 * r->p->unit * ((float) (int32_t) dots[j] * scales[j]) + (norms[r->first + i + j] + norm);
    }
}

static void whole_distances(const range * r, uint64_t i, uint32_t n, const uint32_t * dots, float * distances) {
    distances_of(r, r->codes->norms, r->p->norm, i, n, dots, distances);
}

static void front_distances(const range * r, uint64_t i, uint32_t n, float * distances) {
    distances_of(r, r->codes->front_norms, r->p->front_norm, i, n, r->fronts + i, distances);
}

static float whole_distance(const range * r, uint64_t i) {
    uint32_t dot;
    float distance;
    rest_dots(r, i, 1, &dot);
    whole_distances(r, i, 1, &dot, &distance);
    return distance;
}

static uint32_t block_at(const range * r, uint64_t i) { return (uint32_t) (r->n - i < SCAN_ROWS ? r->n - i : SCAN_ROWS); }

static void scan_whole(const range * r, best * b) {
    uint32_t dots[SCAN_ROWS];
    float distances[SCAN_ROWS];
    for (uint64_t i = 0; i < r->n; i += SCAN_ROWS) {
        const uint32_t n = block_at(r, i);
        front_dots(r, i, n, dots);
        whole_distances(r, i, n, dots, distances);
        best_take_block(b, distances, n, r->first + i);
    }
}

/* Return how large a distance in front may be for a row still to be among the n_best: take the n_best rows nearest in
 * front; the limit is their largest whole distance. Add a little for what rounding may have added. */
static float front_limit(const range * r, best * b) {
    float distances[SCAN_ROWS];
    for (uint64_t i = 0; i < r->n; i += SCAN_ROWS) {
        const uint32_t n = block_at(r, i);
        front_dots(r, i, n, r->fronts + i);
        front_distances(r, i, n, distances);
        best_take_block(b, distances, n, r->first + i);
    }
    best_cut(b);
    float farthest = -INFINITY;
    for (uint32_t i = 0; i < b->n; ++i) {
        const float whole = whole_distance(r, (uint32_t) b->all[i] - r->first);
        farthest = whole > farthest ? whole : farthest;
    }
    return b->n < b->n_best ? INFINITY : farthest + 1e-4f * (fabsf(farthest) + r->p->norm);
}

static void prefetch(const range * r, uint64_t i) {
    const uint32_t n_rest = knn_n_rest(r->codes);
    for (uint32_t at = 0; at < n_rest; at += LLMAAS_KNN_ALIGN) {
        __builtin_prefetch(r->codes->rest + (r->first + i) * n_rest + at);
    }
}

/* Take a few rows that are far from each other. */
static void take_few(const range * r, const uint32_t * rows, uint32_t n, best * b) {
    for (uint32_t i = 0; i < n; ++i) {
        if (i + SCAN_AHEAD < n) {
            prefetch(r, rows[i + SCAN_AHEAD]);
        }
        const float whole = whole_distance(r, rows[i]);
        if (whole < b->threshold) {
            best_take(b, whole, r->first + rows[i]);
        }
    }
}

static void take_block(const range * r, uint64_t i, uint32_t n, best * b) {
    uint32_t dots[SCAN_ROWS];
    float distances[SCAN_ROWS];
    rest_dots(r, i, n, dots);
    whole_distances(r, i, n, dots, distances);
    best_take_block(b, distances, n, r->first + i);
}

/* Scan: skip the rest of rows that are too far away in front. */
static void scan_front(const range * r, best * b) {
    const float limit = front_limit(r, b);
    float distances[SCAN_ROWS];
    uint32_t few[SCAN_FEW + SCAN_MANY], n_few = 0;
    best_clear(b);
    for (uint64_t i = 0; i < r->n; i += SCAN_ROWS) {
        const uint32_t n = block_at(r, i);
        uint32_t n_near = 0;
        front_distances(r, i, n, distances);
        for (uint32_t j = 0; j < n; ++j) {
            n_near += distances[j] <= limit;
        }
        const bool is_many = n_near >= SCAN_MANY;
        for (uint32_t j = 0; n_near && !is_many && j < n; ++j) {
            few[n_few] = (uint32_t) (i + j);
            n_few += distances[j] <= limit;
        }
        if (is_many || n_few >= SCAN_FEW) { /* rows must be taken in ascending order */
            take_few(r, few, n_few, b);
            n_few = 0;
        }
        if (is_many) {
            take_block(r, i, n, b);
        }
    }
    take_few(r, few, n_few, b);
}

llmaas_status llmaas_knn_scan(const llmaas_knn_codes * codes, uint64_t first, uint64_t n, const float * query,
                              uint32_t n_best, uint32_t * scratch, int32_t * rows, float * distances, uint32_t * n_found) {
    if (!knn_codes_valid(codes, first, n) || !query || n_best == 0 || n_best > LLMAAS_KNN_MAX_BEST || !rows || !distances ||
        !n_found || (!scratch && knn_n_rest(codes))) {
        return LLMAAS_EINVAL;
    }
    prepared p;
    if (!prepare(codes, query, &p)) {
        return LLMAAS_EUNSUPPORTED;
    }
    best b;
    b.n_best = n_best;
    best_clear(&b);
    const range r = {codes, &p, first, n, scratch};
    if (knn_n_rest(codes)) {
        scan_front(&r, &b);
    } else {
        scan_whole(&r, &b);
    }
    best_give(&b, rows, distances, n_found);
    return LLMAAS_OK;
}
