/* The reference implementation: every other knn kernel must give the same bits. */
#include "f16.h"
#include "kernels.h"
#include "knn_lanes.h"

#include "bytes.h"

void llmaas_knn_dots_generic(const uint8_t * codes, size_t stride, size_t n_rows, const llmaas_knn_query * query,
                             uint32_t * dots) {
    for (size_t r = 0; r < n_rows; ++r) {
        uint32_t sum = 0;
        for (size_t i = 0; i < stride; ++i) {
            sum += (uint32_t) (codes[r * stride + i] * query->wide[i]);
        }
        dots[r] = sum;
    }
}

float llmaas_knn_distance_generic(const uint8_t * row, const float * query, size_t n_dims) {
    float sums[KNN_LANES] = {0};
    for (size_t i = 0; i < n_dims; ++i) {
        const float difference = f16_to_f32(load_u16(row + 2 * i)) - query[i];
        sums[i % KNN_LANES] += difference * difference;
    }
    return knn_sum(sums);
}

float llmaas_logits_max_generic(const float * logits, size_t n, int * is_nan) { return knn_max_lanes(logits, n, is_nan); }

double llmaas_logits_sum_generic(const float * logits, size_t n, float max) { return knn_exp_tiles(logits, n, max); }
