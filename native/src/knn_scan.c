/* The scan: products of whole numbers by a kernel, distances from them, and the best so far in a buffer. Where codes are in
 * two parts, a distance in the dimensions in front is the least that the whole can be. */
#include "knn_best.h"
#include "knn_codes.h"

#include "../kernels/kernels.h"

#include <math.h>
#include <string.h>

enum {
    SCAN_ROWS       = 64,  /* of a kernel's call: few enough that distances stay in the nearest cache */
    SCAN_STEP       = 16,  /* distances that are compared together */
    SCAN_CANDIDATES = 256, /* rows that are looked at as a whole together */
    SCAN_AHEAD      = 8,   /* of these, so far ahead they are asked for */
};

typedef struct prepared {
    llmaas_knn_query front, rest;
    uint32_t front_offset, rest_offset; /* what the codes' zero adds to every product */
    float unit;       /* of their numbers */
    float norm;       /* squared distance from the centre */
    float front_norm; /* of the dimensions in front */
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

/* Returns what the codes' zero adds. */
static uint32_t put(llmaas_knn_query * query, uint32_t at, double value) {
    const double limit = LLMAAS_KNN_WIDEST;
    const long wide = lrint(value > limit ? limit : value < -limit ? -limit : value), high = (wide + 0x8080) / 256 - 128;
    query->wide[at] = (int16_t) wide;
    query->high[at] = (int8_t) high;
    query->low[at]  = (int8_t) (wide - 256 * high);
    return KNN_ZERO * (uint32_t) wide;
}

static bool prepare(const llmaas_knn_codes * codes, const float * query, prepared * p) {
    double norm = 0, front_norm = 0;
    memset(p, 0, sizeof *p);
    p->unit = unit_of(query, codes);
    for (uint32_t d = 0; d < codes->n_dims; ++d) {
        const double centred = (double) query[d] - (double) codes->centre[d];
        const double value = p->unit > 0 ? centred * (double) codes->steps[d] / (double) p->unit : 0;
        norm += centred * centred;
        if (!(norm < 1e37) || !isfinite(p->unit)) {
            return false;
        }
        if (d < codes->n_front) {
            p->front_offset += put(&p->front, d, value);
            front_norm = norm;
        } else {
            p->rest_offset += put(&p->rest, d - codes->n_front, value);
        }
    }
    p->norm = (float) norm;
    p->front_norm = (float) front_norm;
    return true;
}

static float distance(const prepared * p, uint32_t dot, float scale, float norms) {
    return -2 * p->unit * ((float) (int32_t) dot * scale) + norms;
}

/* Distances of at most SCAN_ROWS rows, in their dimensions in front; norms are those that belong to them. */
static void front_distances(const llmaas_knn_codes * codes, const prepared * p, const float * norms, float norm, uint64_t row,
                            uint32_t n, float * distances) {
    uint32_t dots[SCAN_ROWS];
    llmaas_k()->knn_dots(codes->front + row * codes->n_front, codes->n_front, n, &p->front, dots);
    for (uint32_t i = 0; i < n; ++i) {
        distances[i] = distance(p, dots[i] - p->front_offset, codes->scales[row + i], norms[row + i] + norm);
    }
}

static float whole_distance(const llmaas_knn_codes * codes, const prepared * p, uint64_t row) {
    const uint32_t n_rest = knn_n_rest(codes);
    uint32_t front, rest;
    llmaas_k()->knn_dots(codes->front + row * codes->n_front, codes->n_front, 1, &p->front, &front);
    llmaas_k()->knn_dots(codes->rest + row * n_rest, n_rest, 1, &p->rest, &rest);
    const uint32_t dot = front - p->front_offset + rest - p->rest_offset;
    return distance(p, dot, codes->scales[row], codes->norms[row] + p->norm);
}

static void scan_whole(const llmaas_knn_codes * codes, const prepared * p, uint64_t first, uint64_t n, best * b) {
    float distances[SCAN_ROWS];
    for (uint64_t i = 0; i < n; i += SCAN_ROWS) {
        const uint32_t n_rows = (uint32_t) (n - i < SCAN_ROWS ? n - i : SCAN_ROWS);
        front_distances(codes, p, codes->norms, p->norm, first + i, n_rows, distances);
        best_take_block(b, distances, n_rows, first + i);
    }
}

/* How far away a row in front may be and yet be among the n_best: as far as the farthest of those nearest in front is as a
 * whole. A little more, for what rounding may have added. */
static float front_limit(const llmaas_knn_codes * codes, const prepared * p, uint64_t first, uint64_t n, best * b,
                         float * fronts) {
    for (uint64_t i = 0; i < n; i += SCAN_ROWS) {
        const uint32_t n_rows = (uint32_t) (n - i < SCAN_ROWS ? n - i : SCAN_ROWS);
        front_distances(codes, p, codes->front_norms, p->front_norm, first + i, n_rows, fronts + i);
        best_take_block(b, fronts + i, n_rows, first + i);
    }
    best_cut(b);
    float farthest = -INFINITY;
    for (uint32_t i = 0; i < b->n; ++i) {
        const float whole = whole_distance(codes, p, (uint32_t) b->all[i]);
        farthest = whole > farthest ? whole : farthest;
    }
    return b->n < b->n_best ? INFINITY : farthest + 1e-4f * (fabsf(farthest) + p->norm);
}

static void prefetch(const uint8_t * bytes, uint32_t n) {
    for (uint32_t i = 0; i < n; i += LLMAAS_KNN_ALIGN) {
        __builtin_prefetch(bytes + i);
    }
}

static void take_candidates(const llmaas_knn_codes * codes, const prepared * p, const uint32_t * rows, uint32_t n, best * b) {
    const uint32_t n_rest = knn_n_rest(codes);
    for (uint32_t i = 0; i < n; ++i) {
        if (i + SCAN_AHEAD < n) {
            prefetch(codes->rest + (uint64_t) rows[i + SCAN_AHEAD] * n_rest, n_rest);
            prefetch(codes->front + (uint64_t) rows[i + SCAN_AHEAD] * codes->n_front, codes->n_front);
        }
        const float whole = whole_distance(codes, p, rows[i]);
        if (whole < b->threshold) {
            best_take(b, whole, rows[i]);
        }
    }
}

/* Rows that are too far away in front already are not looked at again. */
static void scan_front(const llmaas_knn_codes * codes, const prepared * p, uint64_t first, uint64_t n, best * b,
                       float * fronts) {
    const float limit = front_limit(codes, p, first, n, b, fronts);
    uint32_t rows[SCAN_CANDIDATES + SCAN_STEP], n_rows = 0;
    best_clear(b);
    for (uint64_t i = 0; i < n; i += SCAN_STEP) {
        const uint32_t n_step = (uint32_t) (n - i < SCAN_STEP ? n - i : SCAN_STEP);
        uint32_t n_near = 0;
        for (uint32_t j = 0; j < n_step; ++j) {
            n_near += fronts[i + j] <= limit;
        }
        for (uint32_t j = 0; n_near && j < n_step; ++j) {
            rows[n_rows] = (uint32_t) (first + i + j);
            n_rows += fronts[i + j] <= limit;
        }
        if (n_rows >= SCAN_CANDIDATES) {
            take_candidates(codes, p, rows, n_rows, b);
            n_rows = 0;
        }
    }
    take_candidates(codes, p, rows, n_rows, b);
}

llmaas_status llmaas_knn_scan(const llmaas_knn_codes * codes, uint64_t first, uint64_t n, const float * query,
                              uint32_t n_best, float * scratch, int32_t * rows, float * distances, uint32_t * n_found) {
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
    if (knn_n_rest(codes)) {
        scan_front(codes, &p, first, n, &b, scratch);
    } else {
        scan_whole(codes, &p, first, n, &b);
    }
    best_give(&b, rows, distances, n_found);
    return LLMAAS_OK;
}
