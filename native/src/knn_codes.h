/* What quantising and scanning share. */
#ifndef LLMAAS_KNN_CODES_H
#define LLMAAS_KNN_CODES_H

#include "llmaas/knn.h"

#include <stdbool.h>

enum { KNN_ZERO = 128, KNN_LARGEST = 127 }; /* the code of 0, and how far others are from it */

static inline bool knn_codes_valid(const llmaas_knn_codes * codes, uint64_t first, uint64_t n) {
    const uint32_t align = LLMAAS_KNN_ALIGN;
    return codes && codes->n_dims > 0 && codes->n_dims <= LLMAAS_KNN_MAX_DIMS &&
           codes->stride == (codes->n_dims + align - 1) / align * align && codes->n_rows <= INT32_MAX &&
           first <= codes->n_rows && n <= codes->n_rows - first && codes->centre && codes->steps &&
           (codes->n_rows == 0 ||
            (codes->codes && codes->scales && codes->norms && (uintptr_t) codes->codes % align == 0));
}

#endif
