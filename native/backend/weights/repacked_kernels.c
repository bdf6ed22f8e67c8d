#include "weights/repacked_kernels.h"

#include <stddef.h>

/* ggml-cpu exports its kernels but declares them in no public header. They are weak, as a build may lack some. */
#define KERNELS(name)                                                                                        \
    __attribute__((weak)) void ggml_gemv_##name(int, float *, size_t, const void *, const void *, int, int); \
    __attribute__((weak)) void ggml_gemm_##name(int, float *, size_t, const void *, const void *, int, int)
KERNELS(q4_0_8x8_q8_0);
KERNELS(iq4_nl_8x8_q8_0);
KERNELS(mxfp4_8x8_q8_0);
KERNELS(q2_K_8x8_q8_K);
KERNELS(q4_K_8x8_q8_K);
#undef KERNELS
__attribute__((weak)) void ggml_quantize_mat_q8_0_4x8(const float *, void *, int64_t);
__attribute__((weak)) void ggml_quantize_mat_q8_K_4x8(const float *, void *, int64_t);

static const llmaas_repacked_kernels kernels[] = {
    {GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, ggml_gemv_q4_0_8x8_q8_0, ggml_gemm_q4_0_8x8_q8_0, ggml_quantize_mat_q8_0_4x8},
    {GGML_TYPE_IQ4_NL, GGML_TYPE_Q8_0, ggml_gemv_iq4_nl_8x8_q8_0, ggml_gemm_iq4_nl_8x8_q8_0,
        ggml_quantize_mat_q8_0_4x8},
    {GGML_TYPE_MXFP4, GGML_TYPE_Q8_0, ggml_gemv_mxfp4_8x8_q8_0, ggml_gemm_mxfp4_8x8_q8_0, ggml_quantize_mat_q8_0_4x8},
    {GGML_TYPE_Q2_K, GGML_TYPE_Q8_K, ggml_gemv_q2_K_8x8_q8_K, ggml_gemm_q2_K_8x8_q8_K, ggml_quantize_mat_q8_K_4x8},
    {GGML_TYPE_Q4_K, GGML_TYPE_Q8_K, ggml_gemv_q4_K_8x8_q8_K, ggml_gemm_q4_K_8x8_q8_K, ggml_quantize_mat_q8_K_4x8},
};

const llmaas_repacked_kernels * llmaas_repacked_kernels_of(enum ggml_type type) {
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; ++i) {
        const llmaas_repacked_kernels * k = &kernels[i];
        if (k->type == type) {
            return k->gemv && k->gemm && k->quantize_batch ? k : NULL;
        }
    }
    return NULL;
}
