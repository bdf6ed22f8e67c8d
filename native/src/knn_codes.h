/* Shared by quantizing and scanning. */
#ifndef LLMAAS_KNN_CODES_H
#define LLMAAS_KNN_CODES_H

#include "llmaas/knn.h"

#include <stdbool.h>

enum { KNN_ZERO = 128, KNN_LARGEST = 127 }; /* the code of 0, and the largest difference of a code from it */

static inline uint32_t knn_stride(const llmaas_knn_codes * codes) {
    return (codes->n_dims + LLMAAS_KNN_ALIGN - 1) / LLMAAS_KNN_ALIGN * LLMAAS_KNN_ALIGN;
}

static inline uint32_t knn_n_rest(const llmaas_knn_codes * codes) { return knn_stride(codes) - codes->n_front; }

static inline bool knn_is_matrix(const uint8_t * bytes) { return bytes && (uintptr_t) bytes % LLMAAS_KNN_ALIGN == 0; }

static inline bool knn_codes_valid(const llmaas_knn_codes * codes, uint64_t first, uint64_t n) {
    if (!codes || codes->n_dims == 0 || codes->n_dims > LLMAAS_KNN_MAX_DIMS || codes->n_front == 0 ||
        codes->n_front % LLMAAS_KNN_ALIGN != 0 || codes->n_front > knn_stride(codes) || codes->n_rows > INT32_MAX ||
        first > codes->n_rows || n > codes->n_rows - first || !codes->center || !codes->steps) {
        return false;
    }
    const bool has_rest = knn_n_rest(codes) > 0;
    return codes->n_rows == 0 || (knn_is_matrix(codes->front) && codes->scales && codes->norms &&
                                  (!has_rest || (knn_is_matrix(codes->rest) && codes->front_norms)));
}

#endif
