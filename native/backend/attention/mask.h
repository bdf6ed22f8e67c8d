/* Values of attention masks: 0, minus infinity (hidden), or distances (ALiBi), as F16 or F32. */
#ifndef LLMAAS_MASK_H
#define LLMAAS_MASK_H

#include "ggml.h"

#include <stdint.h>
#include <string.h>

/* Return eight bytes of hidden columns: several are compared at once. */
static inline uint64_t llmaas_mask_hidden(enum ggml_type type) {
    return type == GGML_TYPE_F16 ? 0xfc00fc00fc00fc00ull : 0xff800000ff800000ull;
}

/* Return the bits of a row's column; `size` is that of the mask's type. */
static inline uint32_t llmaas_mask_bits(const char * row, size_t size, int64_t column) {
    uint32_t bits = 0;
    memcpy(&bits, row + (size_t) column * size, size); /* little endian: the first bytes are the lower ones */
    return bits;
}

static inline uint32_t llmaas_mask_hidden_bits(enum ggml_type type) {
    return type == GGML_TYPE_F16 ? 0xfc00 : 0xff800000;
}

/* Return whether the columns from `column` on are `word`. */
static inline bool llmaas_mask_is(const char * row, size_t size, int64_t column, uint64_t word) {
    uint64_t found;
    memcpy(&found, row + (size_t) column * size, sizeof found);
    return found == word;
}

/* Return the first column from `column` on whose word differs from `word`; it may stop short of the row's last
 * columns. */
static inline int64_t llmaas_mask_skip(const char * row, size_t size, int64_t column, int64_t n, uint64_t word) {
    const int64_t step = (int64_t) (sizeof word / size);
    while (column + step <= n && llmaas_mask_is(row, size, column, word)) {
        column += step;
    }
    return column;
}

#endif
