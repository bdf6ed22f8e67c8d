#include "kernels.h"

#include "bytes.h"

void llmaas_transpose_generic(const uint8_t * src, size_t src_stride, size_t n_rows, size_t n_cols, uint8_t * dst,
                              size_t dst_stride) {
    for (size_t r = 0; r < n_rows; ++r) {
        for (size_t c = 0; c < n_cols; ++c) {
            store_u16(dst + c * dst_stride + 2 * r, load_u16(src + r * src_stride + 2 * c));
        }
    }
}
