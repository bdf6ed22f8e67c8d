/* The best rows of a scan so far. */
#ifndef LLMAAS_KNN_BEST_H
#define LLMAAS_KNN_BEST_H

#include "llmaas/knn.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Candidates are numbers that sort by distance, then by row. The buffer takes candidates below the threshold. When it
 * is full, only the n_best stay, and the largest of them sets the new threshold. */
typedef struct best {
    uint64_t all[2 * LLMAAS_KNN_MAX_BEST];
    uint32_t n;
    uint32_t n_best;
    float    threshold;
} best;

static inline uint32_t order_of(float distance) {
    uint32_t bits;
    memcpy(&bits, &distance, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static inline float distance_of(uint32_t order) {
    const uint32_t bits = order & 0x80000000u ? order & 0x7fffffffu : ~order;
    float distance;
    memcpy(&distance, &bits, sizeof distance);
    return distance;
}

static inline uint64_t middle(uint64_t a, uint64_t b, uint64_t c) {
    return a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
}

/* Reorder so that the n_best smallest come first (Hoare's selection). All numbers must be distinct. */
static inline void select_best(uint64_t * all, uint32_t n, uint32_t n_best) {
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

/* Return the largest of n numbers; all[n_best - 1] need not be the largest of the n_best. */
static inline uint64_t last_of(const uint64_t * all, uint32_t n) {
    uint64_t last = all[0];
    for (uint32_t i = 1; i < n; ++i) {
        last = all[i] > last ? all[i] : last;
    }
    return last;
}

static inline void best_clear(best * b) {
    b->n = 0;
    b->threshold = INFINITY;
}

static inline void best_cut(best * b) {
    if (b->n > b->n_best) {
        select_best(b->all, b->n, b->n_best);
        b->n = b->n_best;
    }
}

static inline void best_take(best * b, float distance, uint64_t row) {
    b->all[b->n++] = (uint64_t) order_of(distance) << 32 | row;
    if (b->n == 2 * b->n_best) {
        best_cut(b);
        b->threshold = distance_of((uint32_t) (last_of(b->all, b->n) >> 32));
    }
}

/* Take the candidates of a block. Rows come in ascending order, so a row exactly at the threshold loses against those
 * in the buffer. */
static inline void best_take_block(best * b, const float * distances, uint32_t n, uint64_t row) {
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

static inline int by_number(const void * a, const void * b) {
    uint64_t x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return x < y ? -1 : x > y;
}

static inline void best_give(best * b, int32_t * rows, float * distances, uint32_t * n_found) {
    best_cut(b);
    qsort(b->all, b->n, sizeof b->all[0], by_number);
    for (uint32_t i = 0; i < b->n; ++i) {
        rows[i] = (int32_t) (uint32_t) b->all[i];
        distances[i] = distance_of((uint32_t) (b->all[i] >> 32));
    }
    *n_found = b->n;
}

#endif
