/* Damaged and hostile payloads: they give an error or decode, never a stray byte (ASan watches exact-size buffers). */
#include "check.h"

enum { N_CELLS = 20, N_TOKENS = 16, N_LAYER = 2 };

static const uint8_t  key[32]  = {7};
static const uint64_t rows_k[] = {128, 130};
static const uint64_t rows_v[] = {66, 0};

static void decode_any(const llmaas_kv_geom * geom, const uint8_t * payload, size_t size, uint8_t * blob, size_t blob_size) {
    const uint8_t * one[1]   = {payload};
    const uint64_t  sizes[1] = {size};
    const uint32_t  first    = 2;
    uint32_t done = 0;
    const llmaas_status status = llmaas_chunks_decode(geom, 1, one, sizes, &first, blob, blob_size, N_CELLS, &done);
    CHECK((status == LLMAAS_OK) == (done == 1));
}

static void check_truncations(const llmaas_kv_geom * geom, const uint8_t * good, size_t n, uint8_t * blob, size_t blob_size) {
    for (size_t cut = 0; cut < n; ++cut) {
        uint8_t * p     = exact_copy(good, cut);
        size_t    plane = 0;
        if (good[8] == LLMAAS_CODEC_PLANES) {
            CHECK(llmaas_chunk_cut(good, n, 7, &plane) == LLMAAS_OK);
            plane = n - plane;
        }
        /* without some of its planes a payload is whole, but not without all of them */
        const bool whole = plane > 0 && (n - cut) % plane == 0 && (n - cut) / plane < 8;
        CHECK(llmaas_chunk_verify(p, cut, key) == (whole ? LLMAAS_OK : LLMAAS_ECORRUPT));
        decode_any(geom, p, cut, blob, blob_size);
        if (cut >= LLMAAS_CHUNK_HEADER) { /* a header that agrees with the short body */
            const uint64_t body = cut - LLMAAS_CHUNK_HEADER;
            memcpy(p + 32, &body, 8);
            decode_any(geom, p, cut, blob, blob_size);
        }
        free(p);
    }
}

static void check_flips(const llmaas_kv_geom * geom, const uint8_t * good, size_t n, uint8_t * blob, size_t blob_size) {
    uint8_t * p = exact_copy(good, n);
    for (size_t bit = 0; bit < 8 * n; bit += bit < 8 * 200 ? 1 : 11) {
        p[bit / 8] ^= (uint8_t) (1u << bit % 8);
        CHECK(llmaas_chunk_verify(p, n, key) != LLMAAS_OK);
        decode_any(geom, p, n, blob, blob_size);
        p[bit / 8] ^= (uint8_t) (1u << bit % 8);
    }
    uint8_t other[32] = {8};
    CHECK(llmaas_chunk_verify(p, n, other) == LLMAAS_ESTALE);
    CHECK(llmaas_chunk_verify(p, n, key) == LLMAAS_OK);
    free(p);
}

static void check_noise(const llmaas_kv_geom * geom, const uint8_t * good, size_t n, uint8_t * blob, size_t blob_size) {
    for (int round = 0; round < 400; ++round) {
        uint8_t *    p    = exact_copy(good, n);
        const size_t from = LLMAAS_CHUNK_HEADER + (round % 2 ? 8 + rnd_below((uint32_t) (n - LLMAAS_CHUNK_HEADER - 8)) : 0);
        fill_random(p + from, n - from);
        if (round % 4 < 2 && good[8] == LLMAAS_CODEC_LOSSLESS) { /* a plausible block head before the noise */
            memcpy(p + LLMAAS_CHUNK_HEADER, good + LLMAAS_CHUNK_HEADER, 8);
            p[LLMAAS_CHUNK_HEADER + 5] = (uint8_t) (1 + rnd_below(33));
        }
        decode_any(geom, p, n, blob, blob_size);
        free(p);
    }
}

static void check_foreign_geometry(const llmaas_kv_geom * geom, const uint8_t * good, size_t n, uint8_t * blob, size_t blob_size) {
    static const uint64_t other_k[] = {130, 128};
    llmaas_kv_geom other = *geom;
    other.k_row = other_k;
    const uint8_t * one[1]   = {good};
    const uint64_t  sizes[1] = {n};
    const uint32_t  first    = 0;
    uint32_t done = 0;
    CHECK(llmaas_blob_size(&other, N_CELLS) == blob_size);
    CHECK(llmaas_chunks_decode(&other, 1, one, sizes, &first, blob, blob_size, N_CELLS, &done) == LLMAAS_ESTALE && done == 0);
}

/* Check planes of any number and size, whatever the body: an error, or a decode within the payload. */
static void check_plane_sizes(const llmaas_kv_geom * geom, const uint8_t * good, size_t n, uint8_t * blob, size_t blob_size) {
    static const uint64_t sizes[] = {0, 1, 7, 64, 1u << 20, UINT64_MAX / 8, UINT64_MAX};
    uint8_t * p = exact_copy(good, n);
    for (uint8_t bits = 0; bits < 20; ++bits) {
        p[9] = bits;
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
            for (uint64_t more = 0; more < 3; ++more) {
                const uint64_t body = n - LLMAAS_CHUNK_HEADER + more * sizes[i];
                size_t cut = 0;
                memcpy(p + 32, &body, 8);
                memcpy(p + 104, &sizes[i], 8);
                CHECK(llmaas_chunk_verify(p, n, key) != LLMAAS_OK || memcmp(p, good, n) == 0);
                CHECK(llmaas_chunk_cut(p, n, 1, &cut) != LLMAAS_OK || (cut >= LLMAAS_CHUNK_HEADER && cut <= n));
                decode_any(geom, p, n, blob, blob_size);
            }
        }
    }
    free(p);
}

/* Check a nonexistent exponent in an otherwise sound LOSSLESS body. */
static void check_symbol(const llmaas_kv_geom * geom, const uint8_t * good, size_t n, uint8_t * blob, size_t blob_size) {
    uint8_t *       bad      = exact_copy(good, n);
    const uint8_t * one[1]   = {bad};
    const uint64_t  sizes[1] = {n};
    const uint32_t  first    = 0;
    uint32_t done = 0;
    CHECK(bad[LLMAAS_CHUNK_HEADER + 4] == 1); /* bit planes */
    bad[LLMAAS_CHUNK_HEADER + 8] = 32;
    CHECK(llmaas_chunks_decode(geom, 1, one, sizes, &first, blob, blob_size, N_CELLS, &done) == LLMAAS_ECORRUPT);
    free(bad);
}

static void check_geometry(const llmaas_kv_geom * base) {
    for (int32_t variant = 0; variant < 2; ++variant) {
        llmaas_kv_geom geom = *base;
        geom.type_v = variant ? LLMAAS_TYPE_BF16 : LLMAAS_TYPE_F16; /* raw blocks among the lossless ones */
        const size_t size = llmaas_blob_size(&geom, N_CELLS);
        int32_t   pos[N_CELLS] = {0};
        uint8_t * blob = exact(size);
        fill_like_kv(blob, size / 2);
        CHECK(llmaas_blob_init(&geom, blob, size, pos, N_CELLS) == LLMAAS_OK);
        for (size_t i = 0; i < 3; ++i) {
            if (llmaas_kernels_select(check_isas[i]) != LLMAAS_OK) {
                continue;
            }
            for (int codec = 0; codec <= LLMAAS_CODEC_PLANES; ++codec) {
                const size_t bound = llmaas_chunk_bound(&geom, codec, 8, N_TOKENS);
                uint8_t *    good  = exact(bound);
                size_t       n     = 0;
                CHECK(llmaas_chunk_encode(&geom, codec, 8, blob, size, N_CELLS, 1, N_TOKENS, key, good, bound, &n) == LLMAAS_OK);
                uint8_t * scratch = exact_copy(blob, size);
                check_truncations(&geom, good, n, scratch, size);
                check_flips(&geom, good, n, scratch, size);
                check_noise(&geom, good, n, scratch, size);
                check_foreign_geometry(&geom, good, n, scratch, size);
                if (codec == LLMAAS_CODEC_PLANES) {
                    check_plane_sizes(&geom, good, n, scratch, size);
                }
                if (codec == LLMAAS_CODEC_LOSSLESS) {
                    check_symbol(&geom, good, n, scratch, size);
                }
                free(good), free(scratch);
            }
        }
        free(blob);
    }
}

int main(void) {
    for (uint32_t v_trans = 0; v_trans < 2; ++v_trans) {
        const llmaas_kv_geom geom = {N_LAYER, v_trans, LLMAAS_TYPE_F16, LLMAAS_TYPE_F16, rows_k, rows_v, 0};
        check_geometry(&geom);
    }
    return 0;
}
