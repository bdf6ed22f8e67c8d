/* Rows of tensors with strides. */
#ifndef LLMAAS_ROWS_H
#define LLMAAS_ROWS_H

#include "ggml.h"

/* Return row i of the ggml_nrows() of a tensor. */
static inline char * llmaas_row(const struct ggml_tensor * tensor, int64_t i) {
    const int64_t i1 = i % tensor->ne[1];
    const int64_t i2 = i / tensor->ne[1] % tensor->ne[2];
    const int64_t i3 = i / tensor->ne[1] / tensor->ne[2];
    const size_t  at = (size_t) i1 * tensor->nb[1] + (size_t) i2 * tensor->nb[2] + (size_t) i3 * tensor->nb[3];
    return (char *) tensor->data + at;
}

#endif
