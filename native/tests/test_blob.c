/* The engine blob: layout, checks, and probing untrusted bytes. */
#include "check.h"

enum { N_CELLS = 5 };

static const uint64_t rows_k[] = {8, 6, 4};
static const uint64_t rows_v[] = {4, 2, 10};
static const uint64_t no_v[]   = {0, 0, 0};
static const int32_t  pos[]    = {3, 9, 1, 0, 77};

static uint8_t * blob_new(const llmaas_kv_geom * geom, size_t * size) {
    *size = llmaas_blob_size(geom, N_CELLS);
    uint8_t * blob = exact(*size);
    fill_random(blob, *size);
    CHECK(llmaas_blob_init(geom, blob, *size, pos, N_CELLS) == LLMAAS_OK);
    return blob;
}

static llmaas_status probe(const uint8_t * blob, size_t size, llmaas_blob_info * info, uint64_t * k, uint64_t * v) {
    return llmaas_blob_probe(blob, size, 3, info, k, v);
}

static void check_probe(const llmaas_kv_geom * geom) {
    llmaas_blob_info info;
    uint64_t k[3], v[3];
    size_t   size = 0;
    uint8_t * blob = blob_new(geom, &size);
    CHECK(probe(blob, size, &info, k, v) == LLMAAS_OK);
    CHECK(info.n_layer == 3 && info.n_cells == N_CELLS && info.v_trans == geom->v_trans && info.type_k == geom->type_k);
    CHECK(memcmp(k, geom->k_row, sizeof k) == 0 && memcmp(v, geom->v_row, sizeof v) == 0);
    CHECK(llmaas_blob_probe(blob, size, 2, &info, k, v) == LLMAAS_ESPACE);
    for (size_t cut = 0; cut < size; ++cut) { /* a cut right behind the keys is a valid model without V */
        uint8_t * p = exact_copy(blob, cut);
        const llmaas_status status = probe(p, cut, &info, k, v);
        CHECK(status != LLMAAS_OK || info.type_v == info.type_k);
        int32_t out[N_CELLS];
        CHECK((llmaas_blob_positions(p, cut, out, N_CELLS) == LLMAAS_OK) == (cut >= 16 + 12 * N_CELLS));
        free(p);
    }
    for (size_t bit = 0; bit < 8 * size; ++bit) { /* any answer, but no stray byte */
        blob[bit / 8] ^= (uint8_t) (1u << bit % 8);
        (void) probe(blob, size, &info, k, v);
        blob[bit / 8] ^= (uint8_t) (1u << bit % 8);
    }
    uint8_t * longer = exact(size + 4);
    memcpy(longer, blob, size);
    memset(longer + size, 0, 4);
    CHECK(probe(longer, size + 4, &info, k, v) != LLMAAS_OK);
    free(longer), free(blob);
}

static void check_check(const llmaas_kv_geom * geom) {
    size_t    size = 0;
    uint8_t * blob = blob_new(geom, &size);
    int32_t   moved[N_CELLS];
    memcpy(moved, pos, sizeof moved);
    moved[4]++;
    CHECK(llmaas_blob_check(geom, blob, size, pos, N_CELLS) == LLMAAS_OK);
    CHECK(llmaas_blob_check(geom, blob, size, moved, N_CELLS) == LLMAAS_ECORRUPT);
    CHECK(llmaas_blob_check(geom, blob, size - 1, pos, N_CELLS) == LLMAAS_ECORRUPT);
    CHECK(llmaas_blob_check(geom, blob, size, pos, N_CELLS - 1) == LLMAAS_ECORRUPT);
    blob[4] ^= 1; /* sequence id */
    blob[16 + 8] ^= 1;
    CHECK(llmaas_blob_check(geom, blob, size, pos, N_CELLS) == LLMAAS_OK);
    llmaas_kv_geom other = *geom;
    other.type_k = 31;
    CHECK(llmaas_blob_check(&other, blob, size, pos, N_CELLS) == LLMAAS_ECORRUPT);
    CHECK(llmaas_blob_init(geom, blob, size - 1, pos, N_CELLS) == LLMAAS_ESPACE);
    CHECK(llmaas_blob_init(geom, blob, size, pos, 0) == LLMAAS_EINVAL);
    free(blob);
}

static llmaas_status check_rows(int32_t type, uint64_t row, uint32_t v_trans) {
    const llmaas_kv_geom geom = {1, v_trans, type, type, &row, &row, 0};
    return llmaas_kv_geom_check(&geom);
}

static void check_geometry(void) {
    CHECK(check_rows(1, 2, 0) == LLMAAS_OK && check_rows(1, 1u << 20, 1) == LLMAAS_OK);
    CHECK(check_rows(1, 0, 0) && check_rows(1, 3, 0) && check_rows(1, (1u << 20) + 2, 0) && check_rows(1, UINT64_MAX - 1, 0));
    CHECK(check_rows(0, 6, 0) && check_rows(8, 32, 0) && check_rows(8, 34, 1) && check_rows(77, 32, 1));
    CHECK(check_rows(8, 34, 0) == LLMAAS_OK && check_rows(77, 3, 0) == LLMAAS_OK && check_rows(1, 2, 2));
    const llmaas_kv_geom a = {3, 0, 1, 1, rows_k, rows_v, 0}, b = {3, 1, 1, 1, rows_k, rows_v, 0};
    const llmaas_kv_geom c = {3, 0, 1, 30, rows_k, rows_v, 0}, d = {3, 0, 1, 1, rows_k, rows_v, 1};
    CHECK(llmaas_kv_geom_hash(&a) == llmaas_kv_geom_hash(&b) && llmaas_kv_geom_hash(&a) != llmaas_kv_geom_hash(&c));
    CHECK(llmaas_kv_geom_hash(&d) != llmaas_kv_geom_hash(&a) && llmaas_kv_geom_hash(&d) != 0);
    const llmaas_kv_geom none = {0, 0, 1, 1, rows_k, rows_v, 0}, many = {1025, 0, 1, 1, rows_k, rows_v, 0};
    CHECK(llmaas_kv_geom_check(&none) && llmaas_kv_geom_check(&many) && llmaas_kv_geom_check(NULL));
    CHECK(llmaas_kv_geom_hash(&none) == 0 && llmaas_blob_size(&none, 1) == 0 && llmaas_blob_size(&a, 0) == 0);
    CHECK(llmaas_blob_size(&a, UINT32_MAX) == 24 + 6 * 12 + (uint64_t) UINT32_MAX * (12 + 34));
}

int main(void) {
    const llmaas_kv_geom geoms[] = {
        {3, 0, 1, 1, rows_k, rows_v, 0}, {3, 1, 1, 1, rows_k, rows_v, 0},   {3, 1, 1, 30, rows_k, rows_v, 0},
        {3, 0, 1, 1, rows_k, no_v, 0},   {3, 0, 99, 99, rows_k, rows_v, 0}, {3, 0, 1, 1, rows_k, rows_v, 1},
        {3, 1, 1, 1, rows_k, rows_v, 2},
    };
    check_geometry();
    for (size_t g = 0; g < sizeof geoms / sizeof *geoms; ++g) {
        check_probe(&geoms[g]);
        check_check(&geoms[g]);
    }
    CHECK(strcmp(llmaas_status_name(LLMAAS_ESTALE), "LLMAAS_ESTALE") == 0 && strcmp(llmaas_status_name(99), "LLMAAS_UNKNOWN") == 0);
    return 0;
}
