/* One row of activations times several groups of a repacked weight that lie apart.
 *
 * ggml-cpu's own kernel reads a group after the other. When each is followed by a gap, the processor's prefetcher starts
 * afresh at every group and never gets up to speed: half of the columns then take longer than all of them. These kernels
 * read LLMAAS_STREAMS groups side by side, in the same order of additions: the results are the same bits. */
#ifndef LLMAAS_REPACKED_ROWS_H
#define LLMAAS_REPACKED_ROWS_H

#include "ggml.h"

#include <stddef.h>

enum { LLMAAS_STREAMS = 8 };

/* Products of LLMAAS_STREAMS groups, `stride` bytes apart, with n quantised activations; 8 values a group to `to`. The next
 * call's groups are `ahead` bytes behind these; 0: nobody knows. */
typedef void (*llmaas_rows_kernel)(
    int n, float * to, const char * groups, size_t stride, size_t ahead, const void * activations);

/* NULL: none for this type or this processor. */
llmaas_rows_kernel llmaas_rows_kernel_of(enum ggml_type type);

#endif
