/* Every instruction set gives the same bytes as the generic kernels, on random and edge values and all sizes around the
 * tiles. */
#include "check.h"
#include "kernels.h"

#include "../kernels/embed.h"

typedef void (*filler)(uint8_t *, size_t);

static void fill_zero(uint8_t * p, size_t n) { memset(p, 0, 2 * n); }

static void fill_bits(uint8_t * p, size_t n) { fill_random(p, 2 * n); }

static void fill_finite(uint8_t * p, size_t n) {
    fill_random(p, 2 * n);
    for (size_t i = 0; i < n; ++i) {
        if ((p[2 * i + 1] & 0x7c) == 0x7c) {
            p[2 * i + 1] &= 0xbf;
        }
    }
}

static void fill_edges(uint8_t * p, size_t n) {
    static const uint16_t edges[] = {0, 0x8000, 1, 0x8001, 2, 60, 0x3ff, 0x400, 0x83ff, 0x7bff, 0xfbff, 0x3c00, 0x0080};
    for (size_t i = 0; i < n; ++i) {
        memcpy(p + 2 * i, &edges[rnd_below(sizeof edges / sizeof *edges)], 2);
    }
}

static void fill_subnormal(uint8_t * p, size_t n) {
    fill_random(p, 2 * n);
    for (size_t i = 0; i < n; ++i) {
        p[2 * i + 1] &= 0x81;
    }
}

/* Fill with values up to the largest magnitude that has an embedded code. */
static void fill_embeddable(uint8_t * p, size_t n) {
    static const uint16_t edges[] = {0x7800, 0xf800, 0x77ff, 0x5640, 0x3c00, 0xbc00, 0x0001, 0x8001, 0};
    const uint32_t n_edges = 1 + rnd_below(sizeof edges / sizeof *edges);
    for (size_t i = 0; i < n; ++i) {
        memcpy(p + 2 * i, &edges[rnd_below(n_edges)], 2);
    }
}

static const filler fillers[] = {fill_zero, fill_bits, fill_finite, fill_edges, fill_subnormal, fill_like_kv, fill_embeddable};

static const size_t cols_list[] = {1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 130, 192};

static void check_int8(const llmaas_kernels * k, const llmaas_kernels * oracle, filler fill, size_t rows, size_t cols) {
    const size_t ns = (cols + 63) / 64 * 2, n = rows * cols;
    uint8_t * x = exact(2 * n), * s0 = exact(rows * ns), * s1 = exact(rows * ns), * q0 = exact(n), * q1 = exact(n);
    uint8_t * y0 = exact(2 * n), * y1 = exact(2 * n);
    fill(x, n);
    const bool ok = oracle->int8_encode(x, 2 * cols, rows, cols, s0, ns, q0, cols);
    CHECK(k->int8_encode(x, 2 * cols, rows, cols, s1, ns, q1, cols) == ok);
    if (ok) {
        CHECK(memcmp(s0, s1, rows * ns) == 0 && memcmp(q0, q1, n) == 0);
        oracle->int8_decode(s0, ns, q0, cols, rows, cols, y0, 2 * cols);
        k->int8_decode(s0, ns, q0, cols, rows, cols, y1, 2 * cols);
        CHECK(memcmp(y0, y1, 2 * n) == 0);
        for (size_t i = 0; i < n; ++i) { /* the documented bound */
            uint16_t a, b, s;
            memcpy(&a, x + 2 * i, 2);
            memcpy(&b, y0 + 2 * i, 2);
            memcpy(&s, s0 + i / cols * ns + i % cols / 64 * 2, 2);
            const float err = f16_to_f32(a) - f16_to_f32(b), scale = f16_to_f32(s), mag = f16_to_f32(b & 0x7fff);
            const float ulp = mag < 0x1p-14f ? 0x1p-24f : mag * 0x1p-10f;
            CHECK((err < 0 ? -err : err) <= scale / 2 * 1.0001f + ulp / 2);
            CHECK((b & 0x7c00) != 0x7c00 && (int8_t) q0[i] >= -127);
        }
    }
    free(x), free(s0), free(s1), free(q0), free(q1), free(y0), free(y1);
}

/* Check that codes of any number of bits are within scale/2^bits and decode to numbers. */
static void check_embed_bound(const uint8_t * x, const uint8_t * y, size_t stride, size_t rows, bool per_channel,
                              const uint8_t * side, unsigned bits) {
    for (size_t i = 0; i < rows * LLMAAS_GROUP; ++i) {
        const size_t r = i / LLMAAS_GROUP, c = i % LLMAAS_GROUP, at = r * stride + 2 * c;
        const float  a = f16_to_f32(load_u16(x + at)), b = f16_to_f32(load_u16(y + at)), mag = b < 0 ? -b : b;
        const float  err = a < b ? b - a : a - b, ulp = mag < 0x1p-14f ? 0x1p-24f : mag * 0x1p-10f;
        CHECK(err <= embed_scale(side[per_channel ? c : r]) / (float) (1u << bits) * 1.0001f + ulp / 2);
    }
}

/* Check rows in whole cache lines, as an engine has them. */
static void check_past_cache(const llmaas_kernels * k, const uint8_t * side, bool per_channel, const uint8_t * planes,
                             unsigned bits, size_t rows, const uint8_t * expected, size_t stride) {
    enum { ROW = 2 * LLMAAS_GROUP };
    _Alignas(64) uint8_t found[LLMAAS_TILE * ROW];
    k->embed_decode(side, per_channel, planes, 8 * rows, bits, rows, found, ROW, true);
    for (size_t r = 0; r < rows; ++r) {
        CHECK(memcmp(found + r * ROW, expected + r * stride, ROW) == 0);
    }
}

static void check_embed(const llmaas_kernels * k, const llmaas_kernels * oracle, filler fill, size_t rows, bool per_channel) {
    const size_t stride = 2 * LLMAAS_GROUP + 6, n = (rows - 1) * stride + 2 * LLMAAS_GROUP, word = 8 * rows;
    const size_t n_side = per_channel ? 2 * LLMAAS_GROUP : rows, n_planes = LLMAAS_BITS * word;
    uint8_t * x = exact(n), * y0 = exact(n), * y1 = exact(n), * s0 = exact(n_side), * s1 = exact(n_side);
    uint8_t * p0 = exact(n_planes), * p1 = exact(n_planes);
    fill(x, n / 2);
    const bool ok = oracle->embed_encode(x, stride, rows, per_channel, s0, p0, word, LLMAAS_BITS);
    CHECK(k->embed_encode(x, stride, rows, per_channel, s1, p1, word, LLMAAS_BITS) == ok);
    CHECK(!ok || (memcmp(s0, s1, n_side) == 0 && memcmp(p0, p1, n_planes) == 0));
    for (unsigned bits = 1; ok && bits <= LLMAAS_BITS; ++bits) {
        uint8_t * cut = exact_copy(p0, bits * word);
        uint8_t * few = exact(bits * word);
        CHECK(k->embed_encode(x, stride, rows, per_channel, s1, few, word, bits) && memcmp(few, p0, bits * word) == 0);
        memset(y0, 0xaa, n), memset(y1, 0xaa, n);
        oracle->embed_decode(s0, per_channel, cut, word, bits, rows, y0, stride, false);
        k->embed_decode(s0, per_channel, cut, word, bits, rows, y1, stride, false);
        CHECK(memcmp(y0, y1, n) == 0);
        check_past_cache(k, s0, per_channel, cut, bits, rows, y0, stride);
        check_embed_bound(x, y0, stride, rows, per_channel, s0, bits);
        free(cut), free(few);
    }
    free(x), free(y0), free(y1), free(s0), free(s1), free(p0), free(p1);
}

/* Check that a value without a code is found wherever it is. */
static void check_embed_refuses(const llmaas_kernels * k) {
    static const uint16_t values[] = {0x7801, 0xf801, 0x7c00, 0xfc00, 0x7e00};
    uint8_t x[LLMAAS_TILE * 2 * LLMAAS_GROUP], side[2 * LLMAAS_GROUP], planes[LLMAAS_BITS * 8 * LLMAAS_TILE];
    memset(x, 0, sizeof x);
    for (size_t i = 0; i < sizeof x / 2; ++i) {
        store_u16(x + 2 * i, values[i % 5]);
        for (int per_channel = 0; per_channel < 2; ++per_channel) {
            CHECK(!k->embed_encode(x, 2 * LLMAAS_GROUP, LLMAAS_TILE, per_channel, side, planes, 8 * LLMAAS_TILE, 8));
        }
        store_u16(x + 2 * i, 0);
    }
}

static void check_transpose(const llmaas_kernels * k, size_t rows, size_t cols) {
    const size_t n = 2 * rows * cols;
    uint8_t * x = exact(n), * a = exact(n), * b = exact(n);
    fill_random(x, n);
    k->transpose(x, 2 * cols, rows, cols, a, 2 * rows);
    for (size_t r = 0; r < rows; ++r) {
        for (size_t c = 0; c < cols; ++c) {
            CHECK(memcmp(x + 2 * (r * cols + c), a + 2 * (c * rows + r), 2) == 0);
        }
    }
    k->transpose(a, 2 * rows, cols, rows, b, 2 * cols);
    CHECK(memcmp(x, b, n) == 0);
    free(x), free(a), free(b);
}

static size_t planes_write(const llmaas_kernels * k, const uint8_t * x, size_t rows, size_t cols, uint8_t * out, size_t room) {
    llmaas_planes_writer w = {.low = out, .fixed = out + rows * cols};
    w.var = w.fixed + rows * LLMAAS_FIXED;
    memset(out, 0, room);
    for (uint8_t e = 0; e < LLMAAS_SYMBOLS; ++e) {
        w.ranks[e] = (uint8_t) ((e * 5 + 23) & 31); /* any permutation; exponent 0 gets a high rank */
    }
    k->planes_encode(&w, x, 2 * cols, rows, cols);
    memcpy(w.var, &w.acc, (w.n_acc + 7) / 8);
    CHECK(w.fixed == out + rows * cols + rows * LLMAAS_FIXED);
    return (size_t) (w.var - w.fixed) * 8 + w.n_acc;
}

static void check_planes(const llmaas_kernels * k, const llmaas_kernels * oracle, filler fill, size_t rows, size_t cols) {
    const size_t n = rows * cols, fixed = n + rows * LLMAAS_FIXED, room = fixed + rows * 64 * 3 + 32;
    uint8_t * x = exact(2 * n), * a = exact(room), * b = exact(room), * y = exact(2 * n);
    fill(x, n);
    const size_t bits = planes_write(oracle, x, rows, cols, a, room);
    CHECK(planes_write(k, x, rows, cols, b, room) == bits);
    CHECK(memcmp(a, b, room) == 0);
    const size_t used = fixed + (bits + 7) / 8 + LLMAAS_VAR_PAD;
    uint8_t * tight = exact_copy(a, used);
    llmaas_planes_reader r = {.low = tight, .fixed = tight + n, .var = tight + fixed, .end = bits};
    for (uint8_t e = 0; e < LLMAAS_SYMBOLS; ++e) {
        r.symbols[(e * 5 + 23) & 31] = (uint8_t) (e << 2);
    }
    CHECK(k->planes_decode(&r, rows, cols, y, 2 * cols));
    CHECK(r.pos == bits && memcmp(x, y, 2 * n) == 0);
    for (int half = 0; half < 2 && bits > 0; ++half) { /* a stream that ends early must be detected before it is read */
        const uint64_t end = half ? bits / 2 : bits - 1;
        uint8_t * cut = exact_copy(a, fixed + (end + 7) / 8 + LLMAAS_VAR_PAD);
        r.low   = cut;
        r.fixed = cut + n;
        r.var   = cut + fixed;
        r.pos   = 0;
        r.end   = end;
        CHECK(!k->planes_decode(&r, rows, cols, y, 2 * cols));
        free(cut);
    }
    free(x), free(a), free(b), free(y), free(tight);
}

/* Check planes of ones, which open level after level: the kernel must stop where the symbols end. */
static void check_endless(const llmaas_kernels * k) {
    const size_t room = 64 + LLMAAS_FIXED + 4096;
    uint8_t      y[128];
    uint8_t *    x = exact(room);
    memset(x, 0xff, room);
    llmaas_planes_reader * r = (void *) exact(sizeof *r); /* on the heap, so that ASan watches its end */
    *r = (llmaas_planes_reader) {.low = x, .fixed = x + 64, .var = x + 64 + LLMAAS_FIXED, .end = 8 * 4000};
    CHECK(!k->planes_decode(r, 1, 64, y, 128));
    free(r), free(x);
}

static void check_crc(void) {
    uint8_t zeros[32] = {0}, ones[32], up[32];
    memset(ones, 0xff, sizeof ones);
    for (uint8_t i = 0; i < 32; ++i) {
        up[i] = i;
    }
    CHECK(llmaas_crc32c(0, (const uint8_t *) "123456789", 9) == 0xe3069283u); /* RFC 3720 B.4 */
    CHECK(llmaas_crc32c(0, zeros, 32) == 0x8a9136aau);
    CHECK(llmaas_crc32c(0, ones, 32) == 0x62a8ab43u);
    CHECK(llmaas_crc32c(0, up, 32) == 0x46dd794eu);
    CHECK(llmaas_crc32c(0, up, 0) == 0);
    for (size_t n = 0; n < 20000; n = n * 3 / 2 + 1) {
        uint8_t * x = exact(n);
        fill_random(x, n);
        const uint32_t whole = llmaas_crc32c_generic(0, x, n);
        CHECK(llmaas_crc32c(0, x, n) == whole);
        const size_t cut = n / 3;
        CHECK(llmaas_crc32c(llmaas_crc32c(0, x, cut), x + cut, n - cut) == whole);
        free(x);
    }
}

static void check_f16(void) {
    for (uint32_t h = 0; h < 0x10000; ++h) { /* every f16 survives the round trip; NaN payloads become quiet */
        const uint16_t want = (h & 0x7fff) > 0x7c00 ? (uint16_t) (h | 0x200) : (uint16_t) h;
        CHECK(f16_from_f32(f16_to_f32((uint16_t) h)) == want);
    }
    CHECK(int8_scale(0) == 0 && int8_scale(1) == 1 && int8_scale(0x7bff) == LLMAAS_INT8_SCALE_MAX);
    CHECK(int8_scale(0x3c00) == f16_from_f32(1.0f / 127.0f) || int8_scale(0x3c00) == f16_from_f32(1.0f / 127.0f) + 1);
}

int main(void) {
    CHECK(llmaas_kernels_select("sse9") == LLMAAS_EINVAL && llmaas_kernels_select(NULL) == LLMAAS_EINVAL);
    CHECK(llmaas_kernels_select("generic") == LLMAAS_OK);
    const llmaas_kernels * oracle = llmaas_k();
    check_f16();
    for (size_t i = 0; i < sizeof check_isas / sizeof *check_isas; ++i) {
        if (llmaas_kernels_select(check_isas[i]) != LLMAAS_OK) {
            continue; /* this CPU lacks it */
        }
        CHECK(strcmp(llmaas_kernels_name(), check_isas[i]) == 0);
        const llmaas_kernels * k = llmaas_k();
        check_crc();
        check_endless(k);
        check_embed_refuses(k);
        for (size_t rows = 1; rows <= LLMAAS_TILE; ++rows) {
            for (size_t i = 0; i < 10 * sizeof fillers / sizeof *fillers; ++i) {
                check_embed(k, oracle, fillers[i / 10], rows, i % 2);
            }
        }
        for (size_t rows = 1; rows <= 33; rows += rows < 17 ? 1 : 15) {
            for (size_t c = 0; c < sizeof cols_list / sizeof *cols_list; ++c) {
                check_transpose(k, rows, cols_list[c]);
                for (size_t f = 0; f < sizeof fillers / sizeof *fillers; ++f) {
                    check_int8(k, oracle, fillers[f], rows, cols_list[c]);
                    if (cols_list[c] <= 64) {
                        check_planes(k, oracle, fillers[f], rows, cols_list[c]);
                    }
                }
            }
        }
    }
    return 0;
}
