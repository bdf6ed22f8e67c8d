/* Which instruction set the core runs on. Chosen once, by CPUID or by LLMAAS_KERNELS=generic|avx2|avx512|avx512vnni. */
#ifndef LLMAAS_KERNELS_H
#define LLMAAS_KERNELS_H

#include "llmaas/base.h"

/* "generic", "avx2", "avx512" or "avx512vnni" (which differs from avx512 in the scan for nearest neighbours and in sparse products). */
LLMAAS_API const char * llmaas_kernels_name(void);

/* For tests and benches; not while other threads are encoding. EINVAL: unknown name. EUNSUPPORTED: this CPU lacks it. */
LLMAAS_API llmaas_status llmaas_kernels_select(const char * name);

/* CRC-32C (Castagnoli) of n bytes, continuing from crc (0 at the start). */
LLMAAS_API uint32_t llmaas_crc32c(uint32_t crc, const uint8_t * data, size_t n);

#endif
