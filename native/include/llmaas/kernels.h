/* The instruction set that the core's kernels use. Chosen once, by CPUID or by
 * LLMAAS_KERNELS=generic|avx2|avx512|avx512vnni. */
#ifndef LLMAAS_KERNELS_H
#define LLMAAS_KERNELS_H

#include "llmaas/base.h"

/* Return "generic", "avx2", "avx512" or "avx512vnni". The last differs from avx512 in the nearest-neighbor scan and in
 * sparse products. */
LLMAAS_API const char * llmaas_kernels_name(void);

/* Select kernels by name, for tests and benches. Do not call while other threads encode. EINVAL: unknown name.
 * EUNSUPPORTED: this CPU lacks them. */
LLMAAS_API llmaas_status llmaas_kernels_select(const char * name);

/* Return the CRC-32C (Castagnoli) of n bytes, continued from crc (0 at the start). */
LLMAAS_API uint32_t llmaas_crc32c(uint32_t crc, const uint8_t * data, size_t n);

#endif
