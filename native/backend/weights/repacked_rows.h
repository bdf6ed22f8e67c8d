/* One row of activations times several groups of a repacked weight that do not lie side by side.
 *
 * ggml-cpu's own kernel reads one group after another. When each is followed by a gap, the processor's prefetcher
 * restarts at every group and never reaches full speed: half of the columns then take longer than all of them. These
 * kernels read LLMAAS_STREAMS groups in parallel, with the same order of additions, so the results are
 * bit-identical. */
#ifndef LLMAAS_REPACKED_ROWS_H
#define LLMAAS_REPACKED_ROWS_H

#include "ggml.h"

#include <stddef.h>

enum { LLMAAS_STREAMS = 8 };

/* Multiply LLMAAS_STREAMS groups, `stride` bytes apart, with n quantized activations; write 8 values per group to `to`.
 * The next call's groups are `ahead` bytes behind these; 0: unknown. */
typedef void (*llmaas_rows_kernel)(
    int n, float * to, const char * groups, size_t stride, size_t ahead, const void * activations);

/* Return the kernel for a type; NULL if there is none for it or for this processor. */
llmaas_rows_kernel llmaas_rows_kernel_of(enum ggml_type type);

#endif
