/* Shared by the C tests: CHECK, a random generator, exact-size buffers (so that ASan sees every stray byte), and a
 * small geometry. */
#ifndef LLMAAS_CHECK_H
#define LLMAAS_CHECK_H

#include "llmaas/llmaas.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                \
    do {                                                                                \
        if (!(condition)) {                                                             \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);     \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

__attribute__((weak)) uint64_t check_seed = 0x9e3779b97f4a7c15ull; /* one for all files of a program */

static inline uint64_t rnd(void) { /* splitmix64 */
    uint64_t z = (check_seed += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static inline uint32_t rnd_below(uint32_t n) { return (uint32_t) (rnd() % n); }

static inline uint8_t * exact(size_t n) {
    uint8_t * p = malloc(n ? n : 1);
    CHECK(p);
    return p;
}

static inline uint8_t * exact_copy(const uint8_t * src, size_t n) {
    uint8_t * p = exact(n);
    memcpy(p, src, n);
    return p;
}

static inline void fill_random(uint8_t * p, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        p[i] = (uint8_t) rnd();
    }
}

/* Fill with roughly normal f16 bits: exponents fall off geometrically below a top that depends on the column. */
static inline void fill_like_kv(uint8_t * p, size_t n_values) {
    for (size_t i = 0; i < n_values; ++i) {
        const unsigned exp = 17 - (unsigned) (i % 7 / 3) - (unsigned) __builtin_ctzll(rnd() | 1ull << 14);
        const uint16_t v   = (uint16_t) ((rnd() & 0x83ff) | exp << 10);
        memcpy(p + 2 * i, &v, 2);
    }
}

static const char * const check_isas[] = {"generic", "avx2", "avx512", "avx512vnni"};

#endif
