/* ggml-cpu's kernels for weights in its CPU_REPACK layout. */
#ifndef LLMAAS_REPACKED_KERNELS_H
#define LLMAAS_REPACKED_KERNELS_H

#include "ggml.h"

/* Rows of a weight that ggml-cpu interleaves, and rows of activations that its gemm interleaves. */
enum { LLMAAS_REPACKED_GROUP = 8, LLMAAS_REPACKED_BATCH = 4 };

typedef void (*llmaas_gem_kernel)(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc);
typedef void (*llmaas_quantize_kernel)(const float * x, void * vy, int64_t k);

/* How ggml-cpu multiplies the groups of a type. activations: the type of single rows; quantize_batch makes interleaved
 * batches of it. */
typedef struct llmaas_repacked_kernels {
    enum ggml_type         type;
    enum ggml_type         activations;
    llmaas_gem_kernel      gemv;
    llmaas_gem_kernel      gemm;
    llmaas_quantize_kernel quantize_batch;
} llmaas_repacked_kernels;

/* Return the kernels for a type; NULL if this ggml-cpu lacks one of them. */
const llmaas_repacked_kernels * llmaas_repacked_kernels_of(enum ggml_type type);

#endif
