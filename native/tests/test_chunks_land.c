/* Chunks decoded straight to where a blob's bytes belong: the result equals decoding into the blob and copying, for
 * every codec, type, orientation and kernel. Landings that do not fit the blob are refused. */
#include "check.h"
#include "kv_plane.h"

enum { N_CELLS = 41, N_ENGINE = 64, N_LAYER = 3, N_PLANES = 2 * N_LAYER, N_CHUNKS = 3 };

static const uint8_t key[32] = {4, 5};

static const uint64_t k_f16[N_LAYER] = {256, 2, 130};
static const uint64_t v_f16[N_LAYER] = {192, 0, 62}; /* one layer has no V */
static const uint64_t k_one[N_LAYER] = {128, 128, 128};
static const uint64_t v_one[N_LAYER] = {128, 2, 256}; /* one layer has a single channel */
static const uint64_t k_f32[N_LAYER] = {64, 4, 132};
static const uint64_t v_f32[N_LAYER] = {260, 8, 12};
static const uint64_t k_q8[N_LAYER]  = {34, 68, 102};

static const llmaas_kv_geom geoms[] = {
    {N_LAYER, 0, LLMAAS_TYPE_F16, LLMAAS_TYPE_F16, k_f16, v_f16, 0},
    {N_LAYER, 1, LLMAAS_TYPE_F16, LLMAAS_TYPE_F16, k_f16, v_f16, 0},
    {N_LAYER, 0, LLMAAS_TYPE_F16, LLMAAS_TYPE_F16, k_one, v_one, 0},
    {N_LAYER, 1, LLMAAS_TYPE_F16, LLMAAS_TYPE_F16, k_one, v_one, 1},
    {N_LAYER, 0, LLMAAS_TYPE_F32, LLMAAS_TYPE_F32, k_f32, v_f32, 0},
    {N_LAYER, 1, LLMAAS_TYPE_F32, LLMAAS_TYPE_F32, k_f32, v_f32, 0},
    {N_LAYER, 0, LLMAAS_TYPE_Q8_0, LLMAAS_TYPE_Q8_0, k_q8, k_q8, 0},
    {N_LAYER, 1, LLMAAS_TYPE_Q8_0, LLMAAS_TYPE_F16, k_q8, v_f16, 0},
};

/* -- an engine's memory -------------------------------------------------------------------------------------------- */

typedef struct engine {
    uint8_t *      memory; /* tensors of N_ENGINE cells, one after another */
    size_t         n_bytes;
    llmaas_landing landings[N_PLANES + 1];
    uint64_t       from[N_PLANES]; /* where a landing's bytes are in the blob */
    uint32_t       n;
} engine;

/* Make an engine whose blob cells start at cell `at`. */
static engine engine_new(const llmaas_kv_geom * geom, uint32_t at) {
    engine made = {0};
    for (uint32_t il = 0; il < N_LAYER; ++il) {
        made.n_bytes += N_ENGINE * (geom->k_row[il] + geom->v_row[il]);
    }
    made.memory = aligned_alloc(64, (made.n_bytes + 63) / 64 * 64);
    CHECK(made.memory);
    for (size_t i = 0; i < made.n_bytes; ++i) {
        made.memory[i] = (uint8_t) (i * 7);
    }
    llmaas_kv_walk  walk   = llmaas_kv_walk_begin(geom, N_CELLS);
    llmaas_kv_plane plane;
    uint8_t *       tensor = made.memory;
    for (; llmaas_kv_walk_next(&walk, &plane); ++made.n) {
        made.from[made.n]     = plane.data;
        made.landings[made.n] = plane.trans
            ? (llmaas_landing) {tensor + at * plane.el, N_ENGINE * plane.el, N_CELLS * plane.el, plane.row / plane.el}
            : (llmaas_landing) {tensor + at * plane.row, 0, (uint64_t) N_CELLS * plane.row, 1};
        tensor += (size_t) N_ENGINE * plane.row;
    }
    return made;
}

/* Copy a blob into the cells, as llama.cpp does. */
static void engine_copy(engine * to, const uint8_t * blob) {
    for (uint32_t i = 0; i < to->n; ++i) {
        const llmaas_landing * landing = &to->landings[i];
        const uint8_t *        from    = blob + to->from[i];
        for (uint64_t piece = 0; piece < landing->n_pieces; ++piece, from += landing->n_bytes) {
            memcpy(landing->first + piece * landing->step, from, landing->n_bytes);
        }
    }
}

static uint8_t * blob_new(const llmaas_kv_geom * geom, size_t * size) {
    int32_t pos[N_CELLS] = {0};
    *size = llmaas_blob_size(geom, N_CELLS);
    uint8_t * blob = exact(*size);
    fill_like_kv(blob, *size / 2);
    CHECK(llmaas_blob_init(geom, blob, *size, pos, N_CELLS) == LLMAAS_OK);
    return blob;
}

/* -- chunks -------------------------------------------------------------------------------------------------------- */

typedef struct chunks {
    const uint8_t * payloads[N_CHUNKS];
    uint64_t        sizes[N_CHUNKS];
    uint32_t        firsts[N_CHUNKS];
} chunks;

/* Make chunks of 16, 16 and 5 tokens; four cells belong to none. */
static chunks chunks_new(const llmaas_kv_geom * geom, int codec, uint32_t bits, const uint8_t * blob, size_t size) {
    static const uint32_t firsts[N_CHUNKS] = {0, 16, 36}, counts[N_CHUNKS] = {16, 16, 5};
    chunks made = {0};
    for (size_t i = 0; i < N_CHUNKS; ++i) {
        const size_t bound = llmaas_chunk_bound(geom, codec, bits, counts[i]);
        uint8_t *    out   = exact(bound);
        size_t       n     = 0;
        CHECK(llmaas_chunk_encode(
                  geom, codec, bits, blob, size, N_CELLS, firsts[i], counts[i], key, out, bound, &n) == LLMAAS_OK);
        made.payloads[i] = exact_copy(out, n);
        made.sizes[i]    = n;
        made.firsts[i]   = firsts[i];
        free(out);
    }
    return made;
}

static void chunks_free(chunks * old) {
    for (size_t i = 0; i < N_CHUNKS; ++i) {
        free((void *) (uintptr_t) old->payloads[i]);
    }
}

static llmaas_status land(const llmaas_kv_geom * geom, const chunks * from, const engine * to, uint32_t * n_done) {
    return llmaas_chunks_land(
        geom, N_CHUNKS, from->payloads, from->sizes, from->firsts, to->landings, to->n, N_CELLS, n_done);
}

static void check_same(const llmaas_kv_geom * geom, int codec, uint32_t bits, uint32_t at) {
    size_t    size   = 0;
    uint8_t * stored = blob_new(geom, &size), * blob = blob_new(geom, &size);
    chunks    given  = chunks_new(geom, codec, bits, stored, size);
    for (size_t i = 0; i < 3; ++i) {
        if (llmaas_kernels_select(check_isas[i]) != LLMAAS_OK) {
            continue;
        }
        engine    expected = engine_new(geom, at), found = engine_new(geom, at);
        uint8_t * decoded  = exact_copy(blob, size);
        uint32_t  n_done   = 0;
        engine_copy(&found, blob); /* contents of the cells that belong to no chunk */
        CHECK(llmaas_chunks_decode(geom, N_CHUNKS, given.payloads, given.sizes, given.firsts, decoded, size, N_CELLS,
                                   &n_done) == LLMAAS_OK);
        engine_copy(&expected, decoded);
        CHECK(memcmp(found.memory, expected.memory, found.n_bytes) != 0);
        CHECK(land(geom, &given, &found, &n_done) == LLMAAS_OK && n_done == N_CHUNKS);
        CHECK(memcmp(found.memory, expected.memory, found.n_bytes) == 0);
        free(expected.memory), free(found.memory), free(decoded);
    }
    chunks_free(&given);
    free(stored), free(blob);
}

/* -- damaged payloads, unsuitable landings ------------------------------------------------------------------------- */

static void check_damaged_one(const llmaas_kv_geom * geom) {
    size_t    size  = 0;
    uint8_t * blob  = blob_new(geom, &size);
    chunks    given = chunks_new(geom, LLMAAS_CODEC_LOSSLESS, 0, blob, size);
    engine    found = engine_new(geom, 3), expected = engine_new(geom, 3);
    uint32_t  n_done = 9;
    engine_copy(&expected, blob);
    given.sizes[1]--;
    CHECK(land(geom, &given, &found, &n_done) == LLMAAS_ECORRUPT && n_done == 1);
    given.sizes[1]++;
    const llmaas_landing * keys = &found.landings[0];
    CHECK(memcmp(keys->first, expected.landings[0].first, 16 * geom->k_row[0]) == 0);
    given.firsts[2] = N_CELLS - 4;
    CHECK(land(geom, &given, &found, &n_done) == LLMAAS_EINVAL && n_done == 2);
    chunks_free(&given);
    free(blob), free(found.memory), free(expected.memory);
}

/* Check that, whatever a payload's body holds, only bytes of its own cells change. */
static void check_noise(const llmaas_kv_geom * geom, int codec) {
    size_t    size  = 0;
    uint8_t * blob  = blob_new(geom, &size);
    chunks    given = chunks_new(geom, codec, 8, blob, size);
    engine    found = engine_new(geom, 5), untouched = engine_new(geom, 5);
    for (int round = 0; round < 100; ++round) {
        uint8_t *      bad      = exact_copy(given.payloads[1], given.sizes[1]);
        const uint8_t * one[1]  = {bad};
        const uint32_t first[1] = {16};
        uint32_t       n_done   = 0;
        for (int i = 0; i < 1 + round % 8; ++i) {
            bad[LLMAAS_CHUNK_HEADER + rnd_below((uint32_t) given.sizes[1] - LLMAAS_CHUNK_HEADER)] = (uint8_t) rnd();
        }
        const llmaas_status status =
            llmaas_chunks_land(geom, 1, one, &given.sizes[1], first, found.landings, found.n, N_CELLS, &n_done);
        CHECK((status == LLMAAS_OK) == (n_done == 1));
        free(bad);
    }
    for (uint32_t i = 0; i < found.n; ++i) { /* restore the previous bytes */
        const llmaas_landing * landing = &found.landings[i];
        const uint64_t         per_cell = landing->n_bytes / N_CELLS;
        for (uint64_t piece = 0; piece < landing->n_pieces; ++piece) {
            const size_t own = (size_t) (landing->first - found.memory) + piece * landing->step + 16 * per_cell;
            memcpy(found.memory + own, untouched.memory + own, 16 * per_cell);
        }
    }
    CHECK(memcmp(found.memory, untouched.memory, found.n_bytes) == 0);
    chunks_free(&given);
    free(blob), free(found.memory), free(untouched.memory);
}

static void check_refused(const llmaas_kv_geom * geom, const chunks * given, const engine * to, uint32_t n_cells) {
    uint8_t *        before   = exact_copy(to->memory, to->n_bytes);
    llmaas_landing * landings = (void *) exact_copy((const void *) to->landings, to->n * sizeof *to->landings);
    uint32_t         n_done   = 9;
    CHECK(!llmaas_landings_fit(geom, landings, to->n, n_cells));
    CHECK(llmaas_chunks_land(geom, N_CHUNKS, given->payloads, given->sizes, given->firsts, landings, to->n, n_cells,
                             &n_done) == LLMAAS_EINVAL && n_done == 0);
    CHECK(memcmp(to->memory, before, to->n_bytes) == 0);
    free(before), free(landings);
}

static void check_foreign_landings(const llmaas_kv_geom * geom) {
    size_t       size  = 0;
    uint8_t *    blob  = blob_new(geom, &size);
    chunks       given = chunks_new(geom, LLMAAS_CODEC_RAW, 0, blob, size);
    const engine right = engine_new(geom, 3);
    CHECK(llmaas_landings_fit(geom, right.landings, right.n, N_CELLS));

    engine wrong = right;
    wrong.n = right.n - 1;
    check_refused(geom, &given, &wrong, N_CELLS);
    wrong.n = right.n + 1;
    check_refused(geom, &given, &wrong, N_CELLS);
    wrong.n = 0;
    check_refused(geom, &given, &wrong, N_CELLS);
    check_refused(geom, &given, &right, N_CELLS - 1);
    check_refused(geom, &given, &right, N_CELLS + 1);
    check_refused(geom, &given, &right, 0);
    for (uint32_t i = 0; i < right.n; ++i) {
        wrong = right, wrong.landings[i].first = NULL;
        check_refused(geom, &given, &wrong, N_CELLS);
        wrong = right, wrong.landings[i].n_bytes--;
        check_refused(geom, &given, &wrong, N_CELLS);
        wrong = right, wrong.landings[i].n_bytes *= 2, wrong.landings[i].n_pieces = 0;
        check_refused(geom, &given, &wrong, N_CELLS);
        wrong = right, wrong.landings[i].n_pieces++; /* two runs of cells instead of one */
        check_refused(geom, &given, &wrong, N_CELLS);
        if (right.landings[i].n_pieces > 1) {
            wrong = right, wrong.landings[i].step = right.landings[i].n_bytes - 2; /* channels overlap */
            check_refused(geom, &given, &wrong, N_CELLS);
            wrong = right, wrong.landings[i].step++; /* not a multiple of an element */
            check_refused(geom, &given, &wrong, N_CELLS);
            wrong = right, wrong.landings[i].step = 0;
            check_refused(geom, &given, &wrong, N_CELLS);
        }
    }
    chunks_free(&given);
    free(blob), free(right.memory);
}

static llmaas_status land_any(const llmaas_kv_geom * geom, uint32_t n, const uint8_t * const * payloads,
                              const uint64_t * sizes, const uint32_t * firsts, const engine * to, uint32_t * n_done) {
    return llmaas_chunks_land(geom, n, payloads, sizes, firsts, to->landings, to->n, N_CELLS, n_done);
}

static void check_arguments(const llmaas_kv_geom * geom) {
    const engine to     = engine_new(geom, 0);
    const chunks none   = {0};
    uint32_t     n_done = 9;
    CHECK(!llmaas_landings_fit(NULL, to.landings, to.n, N_CELLS) && !llmaas_landings_fit(geom, NULL, to.n, N_CELLS));
    CHECK(land_any(geom, 0, NULL, NULL, NULL, &to, &n_done) == LLMAAS_OK && n_done == 0);
    CHECK(land_any(geom, 0, NULL, NULL, NULL, &to, NULL) == LLMAAS_EINVAL);
    CHECK(land_any(geom, 1, NULL, none.sizes, none.firsts, &to, &n_done) == LLMAAS_EINVAL);
    CHECK(land_any(geom, 1, none.payloads, NULL, none.firsts, &to, &n_done) == LLMAAS_EINVAL);
    CHECK(land_any(geom, 1, none.payloads, none.sizes, NULL, &to, &n_done) == LLMAAS_EINVAL);
    CHECK(land_any(NULL, 0, NULL, NULL, NULL, &to, &n_done) == LLMAAS_EINVAL);
    free(to.memory);
}

int main(void) {
    for (size_t g = 0; g < sizeof geoms / sizeof *geoms; ++g) {
        for (uint32_t at = 0; at <= 16; at += 8) { /* rows at the start of a cache line, and elsewhere */
            for (int codec = LLMAAS_CODEC_RAW; codec <= LLMAAS_CODEC_INT8; ++codec) {
                check_same(&geoms[g], codec, 0, at + (uint32_t) codec);
            }
            for (uint32_t bits = 1; bits <= LLMAAS_CHUNK_BITS; ++bits) {
                check_same(&geoms[g], LLMAAS_CODEC_PLANES, bits, at + bits % 3);
            }
        }
        check_damaged_one(&geoms[g]);
        for (int codec = LLMAAS_CODEC_RAW; codec <= LLMAAS_CODEC_PLANES; ++codec) {
            check_noise(&geoms[g], codec);
        }
        check_foreign_landings(&geoms[g]);
        check_arguments(&geoms[g]);
    }
    return 0;
}
