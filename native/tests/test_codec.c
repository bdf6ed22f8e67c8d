/* Round trips of whole chunks: every codec, type, orientation, chunk length and kernel; cells outside stay untouched,
 * and every kernel writes the same payload. */
#include "check.h"

enum { N_CELLS = 41, N_LAYER = 3 };

static const uint8_t key[32] = {1, 2, 3};

static const uint64_t k_f16[N_LAYER] = {256, 2, 130};
static const uint64_t v_f16[N_LAYER] = {192, 0, 62};
static const uint64_t k_f32[N_LAYER] = {64, 4, 132};
static const uint64_t v_f32[N_LAYER] = {260, 8, 0};
static const uint64_t k_q8[N_LAYER]  = {34, 68, 102};
static const uint64_t v_odd[N_LAYER] = {3, 0, 77};

static const llmaas_kv_geom geoms[] = {
    {N_LAYER, 0, LLMAAS_TYPE_F16, LLMAAS_TYPE_F16, k_f16, v_f16, 0}, {N_LAYER, 1, LLMAAS_TYPE_F16, LLMAAS_TYPE_F16, k_f16, v_f16, 0},
    {N_LAYER, 1, LLMAAS_TYPE_F32, LLMAAS_TYPE_F32, k_f32, v_f32, 0}, {N_LAYER, 1, LLMAAS_TYPE_F16, LLMAAS_TYPE_BF16, k_f16, v_f16, 0},
    {N_LAYER, 0, LLMAAS_TYPE_Q8_0, 99, k_q8, v_odd, 0},              {N_LAYER, 1, LLMAAS_TYPE_Q8_0, LLMAAS_TYPE_F16, k_q8, v_f16, 0},
    {N_LAYER, 0, LLMAAS_TYPE_F16, LLMAAS_TYPE_F16, k_f16, v_f16, 1}, {N_LAYER, 1, LLMAAS_TYPE_F16, LLMAAS_TYPE_F16, k_f16, v_f16, 2},
};

static uint8_t * blob_new(const llmaas_kv_geom * geom, size_t * size) {
    int32_t pos[N_CELLS];
    for (int32_t i = 0; i < N_CELLS; ++i) {
        pos[i] = 1000 - 3 * i;
    }
    *size = llmaas_blob_size(geom, N_CELLS);
    uint8_t * blob = exact(*size);
    fill_like_kv(blob, *size / 2);
    CHECK(llmaas_blob_init(geom, blob, *size, pos, N_CELLS) == LLMAAS_OK);
    CHECK(llmaas_blob_check(geom, blob, *size, pos, N_CELLS) == LLMAAS_OK);
    return blob;
}

/* Encode with every kernel; check that the payloads are equal. */
static uint8_t * encode(const llmaas_kv_geom * geom, int codec, uint32_t bits, const uint8_t * blob, size_t size,
                        uint32_t first, uint32_t n, size_t * written) {
    const size_t bound = llmaas_chunk_bound(geom, codec, bits, n);
    uint8_t *    out   = NULL;
    for (size_t i = 0; i < 3; ++i) {
        if (llmaas_kernels_select(check_isas[i]) != LLMAAS_OK) {
            continue;
        }
        uint8_t * dst = exact(bound);
        size_t    got = 0;
        CHECK(llmaas_chunk_encode(geom, codec, bits, blob, size, N_CELLS, first, n, key, dst, bound, &got) == LLMAAS_OK);
        CHECK(got <= bound && (codec == LLMAAS_CODEC_LOSSLESS || got == bound));
        CHECK(llmaas_chunk_verify(dst, got, key) == LLMAAS_OK && llmaas_chunk_verify(dst, got, NULL) == LLMAAS_OK);
        CHECK(!out || (*written == got && memcmp(out, dst, got) == 0));
        if (bound > 0) {
            const size_t cap = bound - 1;
            CHECK(llmaas_chunk_encode(geom, codec, bits, blob, size, N_CELLS, first, n, key, dst, cap, &got) == LLMAAS_ESPACE);
        }
        free(out);
        out      = exact_copy(dst, got);
        *written = got;
        free(dst);
    }
    return out;
}

static void round_trip(const llmaas_kv_geom * geom, int codec, const uint8_t * blob, size_t size, uint32_t first, uint32_t n) {
    size_t          written = 0;
    uint8_t *       payload = encode(geom, codec, 0, blob, size, first, n, &written);
    const uint8_t * one[1]  = {payload};
    const uint64_t  sizes[1] = {written};
    uint8_t *       want     = NULL;
    for (size_t i = 0; i < 3; ++i) {
        if (llmaas_kernels_select(check_isas[i]) != LLMAAS_OK) {
            continue;
        }
        uint8_t * back = exact_copy(blob, size);
        uint32_t  done = 9;
        if (codec != LLMAAS_CODEC_INT8) { /* wipe the cells with a raw chunk of zeros, then restore them */
            const size_t zero_bytes = llmaas_chunk_bound(geom, LLMAAS_CODEC_RAW, 0, n);
            uint8_t * zero_blob = exact_copy(blob, size), * zero = exact(zero_bytes);
            size_t got = 0;
            CHECK(llmaas_chunk_encode(geom, 0, 0, zero_blob, size, N_CELLS, first, n, key, zero, zero_bytes, &got) == LLMAAS_OK);
            memset(zero + LLMAAS_CHUNK_HEADER, 0, zero_bytes - LLMAAS_CHUNK_HEADER);
            const uint8_t * zeros[1] = {zero};
            const uint64_t  zero_sizes[1] = {got};
            CHECK(llmaas_chunks_decode(geom, 1, zeros, zero_sizes, &first, back, size, N_CELLS, &done) == LLMAAS_OK);
            CHECK(memcmp(back, blob, size) != 0);
            free(zero_blob), free(zero);
        }
        CHECK(llmaas_chunks_decode(geom, 1, one, sizes, &first, back, size, N_CELLS, &done) == LLMAAS_OK && done == 1);
        if (codec != LLMAAS_CODEC_INT8) {
            CHECK(memcmp(back, blob, size) == 0);
        }
        CHECK(!want || memcmp(want, back, size) == 0);
        free(want);
        want = back;
    }
    free(want), free(payload);
}

/* Decode one payload with every kernel, into cells of which each byte is wrong, and again into their complements. Both
 * must give the same bytes in the chunk's cells, and no other byte may change. */
static uint8_t * decode(const llmaas_kv_geom * geom, const uint8_t * payload, size_t n, const uint8_t * blob, size_t size,
                        uint32_t first, size_t n_bytes) {
    const uint64_t sizes[1] = {n};
    uint8_t *      out      = NULL;
    for (size_t i = 0; i < 3; ++i) {
        if (llmaas_kernels_select(check_isas[i]) != LLMAAS_OK) {
            continue;
        }
        uint8_t * a = exact_copy(blob, size), * b = exact_copy(blob, size);
        uint32_t  done  = 0;
        size_t    equal = 0;
        for (size_t at = 0; at < size; ++at) {
            b[at] ^= 0xff;
        }
        CHECK(llmaas_chunks_decode(geom, 1, &payload, sizes, &first, a, size, N_CELLS, &done) == LLMAAS_OK && done == 1);
        CHECK(llmaas_chunks_decode(geom, 1, &payload, sizes, &first, b, size, N_CELLS, &done) == LLMAAS_OK && done == 1);
        for (size_t at = 0; at < size; ++at) {
            equal += a[at] == b[at];
            CHECK(a[at] == b[at] || (a[at] == blob[at] && (b[at] ^ blob[at]) == 0xff));
        }
        CHECK(equal == n_bytes);
        CHECK(!out || memcmp(out, a, size) == 0);
        free(out), free(b);
        out = a;
    }
    return out;
}

/* Check that every cut of a payload is a payload: it verifies unchanged, holds what a fresh encoding with as many bits
 * holds, and decodes to the same. */
static void check_planes(const llmaas_kv_geom * geom, const uint8_t * blob, size_t size, uint32_t first, uint32_t n) {
    size_t       whole_bytes = 0;
    uint8_t *    whole  = encode(geom, LLMAAS_CODEC_PLANES, 8, blob, size, first, n, &whole_bytes);
    const size_t n_bytes = llmaas_chunk_bound(geom, LLMAAS_CODEC_RAW, 0, n) - LLMAAS_CHUNK_HEADER;
    for (uint32_t bits = 1; bits <= 8; ++bits) {
        size_t            n_cut = 0, n_again = 0, n_fresh = 0;
        llmaas_chunk_info info;
        CHECK(llmaas_chunk_cut(whole, whole_bytes, bits, &n_cut) == LLMAAS_OK);
        uint8_t * cut   = exact_copy(whole, n_cut);
        uint8_t * fresh = encode(geom, LLMAAS_CODEC_PLANES, bits, blob, size, first, n, &n_fresh);
        CHECK(llmaas_chunk_peek(cut, n_cut, &info) == LLMAAS_OK && info.codec == LLMAAS_CODEC_PLANES);
        CHECK(info.bits == (n_cut < whole_bytes ? bits : 8) && info.body_bytes == n_cut - LLMAAS_CHUNK_HEADER);
        CHECK(llmaas_chunk_verify(cut, n_cut, key) == LLMAAS_OK);
        CHECK(llmaas_chunk_cut(cut, n_cut, 8, &n_again) == LLMAAS_OK && n_again == n_cut);
        CHECK(n_cut == n_fresh && memcmp(cut + LLMAAS_CHUNK_HEADER, fresh + LLMAAS_CHUNK_HEADER, info.body_bytes) == 0);
        uint8_t * x = decode(geom, cut, n_cut, blob, size, first, n_bytes);
        uint8_t * y = decode(geom, fresh, n_fresh, blob, size, first, n_bytes);
        CHECK(memcmp(x, y, size) == 0);
        free(cut), free(fresh), free(x), free(y);
    }
    free(whole);
}

static void check_batch(const llmaas_kv_geom * geom, const uint8_t * blob, size_t size) {
    /* more chunks than one batch, of all codecs, shuffled over the cells, one token each */
    enum { N = 150 };
    const uint8_t * payloads[N];
    uint64_t sizes[N];
    uint32_t firsts[N], done = 0;
    uint8_t * back = exact_copy(blob, size);
    for (uint32_t i = 0; i < N; ++i) {
        size_t written = 0;
        firsts[i]   = i * 7 % N_CELLS;
        payloads[i] = encode(geom, (int) (i % 2), 0, blob, size, firsts[i], 1, &written);
        sizes[i]    = written;
    }
    CHECK(llmaas_chunks_decode(geom, N, payloads, sizes, firsts, back, size, N_CELLS, &done) == LLMAAS_OK && done == N);
    CHECK(memcmp(back, blob, size) == 0);
    sizes[100]--; /* the damaged one stops the call; those before it are in place */
    CHECK(llmaas_chunks_decode(geom, N, payloads, sizes, firsts, back, size, N_CELLS, &done) == LLMAAS_ECORRUPT && done == 100);
    sizes[100]++;
    firsts[7] = N_CELLS;
    CHECK(llmaas_chunks_decode(geom, N, payloads, sizes, firsts, back, size, N_CELLS, &done) == LLMAAS_EINVAL && done == 7);
    CHECK(llmaas_chunks_decode(geom, 0, NULL, NULL, NULL, back, size, N_CELLS, &done) == LLMAAS_OK && done == 0);
    for (uint32_t i = 0; i < N; ++i) {
        free((void *) (uintptr_t) payloads[i]);
    }
    free(back);
}

static void check_special_values(void) {
    const llmaas_kv_geom * geom = &geoms[0];
    size_t    size = 0, got = 0;
    uint8_t * blob = blob_new(geom, &size);
    uint8_t * out  = exact(llmaas_chunk_bound(geom, LLMAAS_CODEC_PLANES, 8, 16));
    const uint16_t inf = 0x7c00;
    memcpy(blob + 24 + 12 * N_CELLS + 12 + 256 * 5 + 254, &inf, 2); /* layer 0, cell 5, last K value */
    for (size_t i = 0; i < 3; ++i) {
        if (llmaas_kernels_select(check_isas[i]) == LLMAAS_OK) {
            const size_t cap = llmaas_chunk_bound(geom, LLMAAS_CODEC_PLANES, 8, 16);
            for (int codec = LLMAAS_CODEC_INT8; codec <= LLMAAS_CODEC_PLANES; ++codec) {
                CHECK(llmaas_chunk_encode(geom, codec, 8, blob, size, N_CELLS, 0, 16, key, out, cap, &got) == LLMAAS_EUNSUPPORTED);
                CHECK(llmaas_chunk_encode(geom, codec, 8, blob, size, N_CELLS, 6, 16, key, out, cap, &got) == LLMAAS_OK);
            }
        }
    }
    round_trip(geom, LLMAAS_CODEC_LOSSLESS, blob, size, 0, 16);
    free(blob), free(out);
}

/* Check arguments that the encoder must refuse. */
static void check_arguments(const llmaas_kv_geom * geom, const uint8_t * blob, size_t size) {
    uint8_t * out = exact(1 << 16);
    size_t    got = 0;
    CHECK(llmaas_chunk_bound(geom, 4, 8, 1) == 0 && llmaas_chunk_bound(geom, -1, 8, 1) == 0);
    CHECK(llmaas_chunk_bound(geom, 0, 0, 0) == 0 && llmaas_chunk_bound(geom, 0, 0, 257) == 0);
    CHECK(llmaas_chunk_bound(geom, 0, 0, 256) > 0 && llmaas_chunk_bound(geom, 3, 8, 256) > 0);
    CHECK(llmaas_chunk_bound(geom, 3, 0, 1) == 0 && llmaas_chunk_bound(geom, 3, 9, 1) == 0);
    CHECK(llmaas_chunk_encode(geom, 3, 9, blob, size, N_CELLS, 0, 16, key, out, 1 << 16, &got) == LLMAAS_EINVAL);
    CHECK(llmaas_chunk_encode(geom, 2, 9, blob, size, N_CELLS, 0, 16, key, out, 1 << 16, &got) == LLMAAS_OK);
    size_t cut = 0;
    CHECK(llmaas_chunk_cut(out, got, 1, &cut) == LLMAAS_OK && cut == got);
    CHECK(llmaas_chunk_cut(out, got, 0, &cut) == LLMAAS_EINVAL && llmaas_chunk_cut(out, got, 9, &cut) == LLMAAS_EINVAL);
    CHECK(llmaas_chunk_cut(out, got - 1, 1, &cut) == LLMAAS_ECORRUPT && llmaas_chunk_cut(out, got, 1, NULL) == LLMAAS_EINVAL);
    CHECK(llmaas_chunk_encode(geom, 0, 0, blob, size, N_CELLS, N_CELLS - 15, 16, key, out, 1 << 16, &got) == LLMAAS_EINVAL);
    CHECK(llmaas_chunk_encode(geom, 0, 0, blob, size, N_CELLS, UINT32_MAX, 16, key, out, 1 << 16, &got) == LLMAAS_EINVAL);
    CHECK(llmaas_chunk_encode(geom, 0, 0, blob, size - 1, N_CELLS, 0, 16, key, out, 1 << 16, &got) == LLMAAS_EINVAL);
    CHECK(llmaas_chunk_encode(geom, 0, 0, blob, size, N_CELLS, 0, N_CELLS + 1, key, out, 1 << 16, &got) == LLMAAS_EINVAL);
    CHECK(llmaas_chunk_encode(NULL, 0, 0, blob, size, N_CELLS, 0, 16, key, out, 1 << 16, &got) == LLMAAS_EINVAL);
    free(out);
}

int main(void) {
    for (size_t g = 0; g < sizeof geoms / sizeof *geoms; ++g) {
        size_t    size = 0;
        uint8_t * blob = blob_new(&geoms[g], &size);
        for (int codec = 0; codec <= 2; ++codec) {
            for (uint32_t n = 1; n <= 16; ++n) {
                round_trip(&geoms[g], codec, blob, size, rnd_below(N_CELLS - n + 1), n);
            }
            round_trip(&geoms[g], codec, blob, size, 0, N_CELLS);
            round_trip(&geoms[g], codec, blob, size, 3, 33);
        }
        check_planes(&geoms[g], blob, size, rnd_below(N_CELLS), 1);
        check_planes(&geoms[g], blob, size, 7, 16);
        check_planes(&geoms[g], blob, size, 3, 37);
        check_batch(&geoms[g], blob, size);
        check_arguments(&geoms[g], blob, size);
        free(blob);
    }
    check_special_values();
    return 0;
}
