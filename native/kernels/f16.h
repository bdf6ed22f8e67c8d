/* Scalar f16 <-> f32 conversions, exactly as F16C does them (round to nearest even unless the name says otherwise). */
#ifndef LLMAAS_F16_H
#define LLMAAS_F16_H

#include <stdint.h>
#include <string.h>

#define LLMAAS_F16_INF 0x7c00u

static inline float f32_from_bits(uint32_t bits) { float f; memcpy(&f, &bits, sizeof f); return f; }
static inline uint32_t f32_bits(float f) { uint32_t bits; memcpy(&bits, &f, sizeof bits); return bits; }

static inline float f16_to_f32(uint16_t h) {
    const uint32_t sign = (uint32_t) (h & 0x8000u) << 16;
    const uint32_t exp  = (h >> 10) & 31u;
    const uint32_t man  = h & 0x3ffu;
    if (exp == 31) {
        return f32_from_bits(sign | 0x7f800000u | (man << 13) | (man ? 0x400000u : 0u));
    }
    if (exp == 0) {
        const float magnitude = (float) man * 0x1p-24f; /* exact: zero or subnormal */
        return f32_from_bits(sign | f32_bits(magnitude));
    }
    return f32_from_bits(sign | ((exp + 112u) << 23) | (man << 13));
}

/* Convert a magnitude >= 0 and finite. up: round towards +inf instead of to nearest even. */
static inline uint16_t f16_from_magnitude(float magnitude, int up) {
    const uint32_t bits = f32_bits(magnitude);
    const uint32_t exp  = bits >> 23;
    if (exp >= 143) {
        return LLMAAS_F16_INF;
    }
    if (exp < 102) { /* below half of the smallest subnormal */
        return (uint16_t) (up && bits != 0);
    }
    /* keep 11 bits (fewer for subnormals): value = man × 2^(exp - 150), wanted in units of 2^(max(exp,113) - 137) */
    const uint32_t man   = (bits & 0x7fffffu) | 0x800000u;
    const uint32_t shift = exp >= 113 ? 13 : 126 - exp;
    const uint32_t rest  = man & ((1u << shift) - 1u);
    const uint32_t half  = 1u << (shift - 1);
    uint32_t h = man >> shift;
    if (exp >= 113) {
        h += (exp - 113) << 10; /* the implicit leading one adds the last 1 << 10 */
    }
    h += up ? rest != 0 : rest > half || (rest == half && (h & 1u));
    return (uint16_t) h;
}

static inline uint16_t f16_from_f32(float f) {
    const uint32_t bits = f32_bits(f);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t mag  = bits & 0x7fffffffu;
    if (mag > 0x7f800000u) { /* quiet NaN; the payload is kept, as F16C does */
        return (uint16_t) (sign | 0x7e00u | ((mag >> 13) & 0x3ffu));
    }
    return (uint16_t) (sign | f16_from_magnitude(f32_from_bits(mag), 0));
}

/* Return the scale of an int8 group whose largest magnitude is amax (f16 bits, finite). It is rounded up so that |q| <=
 * 127 holds for subnormal scales too, and capped because 127 × 516 would decode to infinity. 0x6007 is 515.5. */
#define LLMAAS_INT8_SCALE_MAX 0x6007u

static inline uint16_t int8_scale(uint16_t amax) {
    const uint16_t scale = f16_from_magnitude(f16_to_f32(amax) / 127.0f, 1);
    return scale > LLMAAS_INT8_SCALE_MAX ? (uint16_t) LLMAAS_INT8_SCALE_MAX : scale;
}

#endif
