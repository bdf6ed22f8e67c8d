/* CPU detection and the dispatch table. */
#include "llmaas/kernels.h"

#include "kernels.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define KERNELS(kernels_name, isa, crc, products)                                                                        \
    {                                                                                                                    \
        /* .name          = */ kernels_name,                                                                             \
        /* .crc32c        = */ crc,                                                                                      \
        /* .transpose     = */ llmaas_transpose_##isa,                                                                   \
        /* .int8_encode   = */ llmaas_int8_encode_##isa,                                                                 \
        /* .int8_decode   = */ llmaas_int8_decode_##isa,                                                                 \
        /* .exponents     = */ llmaas_exponents_generic,                                                                 \
        /* .planes_encode = */ llmaas_planes_encode_##isa,                                                               \
        /* .planes_decode = */ llmaas_planes_decode_##isa,                                                               \
        /* .embed_encode  = */ llmaas_embed_encode_##isa,                                                                \
        /* .embed_decode  = */ llmaas_embed_decode_##isa,                                                                \
        /* .knn_dots      = */ llmaas_knn_dots_##products,                                                               \
        /* .knn_distance  = */ llmaas_knn_distance_##isa,                                                                \
        /* .logits_max    = */ llmaas_logits_max_##isa,                                                                  \
        /* .logits_sum    = */ llmaas_logits_sum_##isa,                                                                  \
        /* .active_tile   = */ llmaas_active_tile_##products,                                                            \
        /* .rank_reduce   = */ llmaas_rank_reduce_##isa,                                                                 \
        /* .rank_expand   = */ llmaas_rank_expand_##isa,                                                                 \
    }

/* Best first. */
static const llmaas_kernels kernels_all[] = {
#ifdef LLMAAS_X86
    KERNELS("avx512vnni", avx512, llmaas_crc32c_sse42, avx512vnni),
    KERNELS("avx512", avx512, llmaas_crc32c_sse42, avx512),
    KERNELS("avx2", avx2, llmaas_crc32c_sse42, avx2),
#endif
    KERNELS("generic", generic, llmaas_crc32c_generic, generic),
};

static const size_t n_kernels = sizeof kernels_all / sizeof kernels_all[0];

static bool cpu_has(const char * name) {
    if (strcmp(name, "generic") == 0) {
        return true;
    }
#ifdef LLMAAS_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("sse4.2") &&
                      __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("popcnt");
    if (strcmp(name, "avx2") == 0) {
        return avx2;
    }
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return strcmp(name, "avx512") == 0 ? avx512 : avx512 && __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

static const llmaas_kernels * kernels_find(const char * name) {
    for (size_t i = 0; i < n_kernels; ++i) {
        if (strcmp(kernels_all[i].name, name) == 0) {
            return &kernels_all[i];
        }
    }
    return NULL;
}

/* Choose kernels. An LLMAAS_KERNELS that is unknown or that this CPU lacks is ignored: a wrong guess must not stop an
 * application. */
static const llmaas_kernels * kernels_detect(void) {
    const char * wanted = getenv("LLMAAS_KERNELS");
    const llmaas_kernels * found = wanted ? kernels_find(wanted) : NULL;
    if (found && cpu_has(found->name)) {
        return found;
    }
    for (size_t i = 0; i + 1 < n_kernels; ++i) {
        if (cpu_has(kernels_all[i].name)) {
            return &kernels_all[i];
        }
    }
    return &kernels_all[n_kernels - 1];
}

static _Atomic(const llmaas_kernels *) kernels_current;

const llmaas_kernels * llmaas_k(void) {
    const llmaas_kernels * k = atomic_load_explicit(&kernels_current, memory_order_acquire);
    if (!k) {
        k = kernels_detect(); /* racing threads find the same */
        atomic_store_explicit(&kernels_current, k, memory_order_release);
    }
    return k;
}

const char * llmaas_kernels_name(void) { return llmaas_k()->name; }

llmaas_status llmaas_kernels_select(const char * name) {
    const llmaas_kernels * found = name ? kernels_find(name) : NULL;
    if (!found) {
        return LLMAAS_EINVAL;
    }
    if (!cpu_has(found->name)) {
        return LLMAAS_EUNSUPPORTED;
    }
    atomic_store_explicit(&kernels_current, found, memory_order_release);
    return LLMAAS_OK;
}

uint32_t llmaas_crc32c(uint32_t crc, const uint8_t * data, size_t n) { return llmaas_k()->crc32c(crc, data, n); }
