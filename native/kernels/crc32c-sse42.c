/* CRC-32C with the SSE4.2 instruction. Its latency is three cycles, so three streams run in parallel. A carry-less
 * multiplication shifts each stream's CRC past the bytes that follow it. */
#include "kernels.h"

#include <immintrin.h>

#include "bytes.h"

enum { STREAM = 1024 };

/* x^(8 n - 33) mod P, reflected, for n = STREAM and 2 × STREAM. */
#define PAST_ONE 0x170076fa
#define PAST_TWO 0xa51b6135u

static uint64_t shift(uint64_t crc, uint32_t by) {
    const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long) crc), _mm_cvtsi64_si128(by), 0);
    return _mm_crc32_u64(0, (uint64_t) _mm_cvtsi128_si64(product));
}

uint32_t llmaas_crc32c_sse42(uint32_t crc, const uint8_t * data, size_t n) {
    uint64_t c = ~crc;
    for (; n >= 3 * STREAM; n -= 3 * STREAM, data += 3 * STREAM) {
        uint64_t c1 = 0, c2 = 0;
        for (size_t i = 0; i < STREAM; i += 8) {
            c  = _mm_crc32_u64(c, load_u64(data + i));
            c1 = _mm_crc32_u64(c1, load_u64(data + i + STREAM));
            c2 = _mm_crc32_u64(c2, load_u64(data + i + 2 * STREAM));
        }
        c = shift(c, PAST_TWO) ^ shift(c1, PAST_ONE) ^ c2;
    }
    for (; n >= 8; n -= 8, data += 8) {
        c = _mm_crc32_u64(c, load_u64(data));
    }
    uint32_t tail = (uint32_t) c;
    for (; n > 0; --n, ++data) {
        tail = _mm_crc32_u8(tail, *data);
    }
    return ~tail;
}
