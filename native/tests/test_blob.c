/* The engine blob: layout, checks, sorting, and probing untrusted bytes. */
#include "check.h"
#include "kv_plane.h"

enum { N_CELLS = 5 };

static const uint64_t rows_k[] = {8, 6, 4};
static const uint64_t rows_v[] = {4, 2, 10};
static const uint64_t rows_f32[] = {4, 8, 12};
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
    for (size_t cut = 0; cut < size; ++cut) { /* a blob cut right behind the keys is a valid model without V */
        uint8_t * p = exact_copy(blob, cut);
        const llmaas_status status = probe(p, cut, &info, k, v);
        CHECK(status != LLMAAS_OK || info.type_v == info.type_k);
        int32_t out[N_CELLS];
        CHECK((llmaas_blob_positions(p, cut, out, N_CELLS) == LLMAAS_OK) == (cut >= 16 + 12 * N_CELLS));
        free(p);
    }
    for (size_t bit = 0; bit < 8 * size; ++bit) { /* any answer is fine, but no stray byte */
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

/* Return where element e of cell i of a plane lies. */
static size_t place(const llmaas_kv_plane * plane, uint32_t n_cells, uint32_t i, uint32_t e) {
    return plane->data + (plane->trans ? ((size_t) e * n_cells + i) * plane->el : (size_t) i * plane->row + e * plane->el);
}

/* Fill cell i of one cache from cell order[i] of another blob. */
static void shuffle_cache(const llmaas_kv_geom * geom, uint8_t * to, const uint8_t * from, const uint32_t * order,
                          uint32_t n_cells, bool is_second) {
    llmaas_kv_walk  walk = llmaas_kv_walk_begin(geom, n_cells);
    llmaas_kv_plane plane;
    uint64_t        cells = LLMAAS_BLOB_HEAD;
    while (llmaas_kv_walk_next(&walk, &plane)) {
        for (uint32_t i = 0; (walk.second != 0) == is_second && i < n_cells; ++i) {
            for (uint32_t e = 0; e < plane.row / plane.el; ++e) {
                memcpy(to + place(&plane, n_cells, i, e), from + place(&plane, n_cells, order[i], e), plane.el);
            }
        }
        cells = is_second ? walk.second + LLMAAS_BLOB_CACHE : cells;
    }
    for (uint32_t i = 0; i < n_cells; ++i) {
        memcpy(to + cells + i * LLMAAS_BLOB_CELL, from + cells + order[i] * LLMAAS_BLOB_CELL, LLMAAS_BLOB_CELL);
    }
}

/* Make a random order: whole runs change places, as among parked contexts, or every cell does. */
static void any_order(uint32_t * order, uint32_t n_cells, bool in_runs) {
    const uint32_t shift = rnd_below(n_cells);
    for (uint32_t i = 0; i < n_cells; ++i) {
        order[i] = (i + shift) % n_cells;
    }
    for (uint32_t i = 0; !in_runs && i < n_cells; ++i) {
        const uint32_t j = rnd_below(i + 1), was = order[i];
        order[i] = order[j];
        order[j] = was;
    }
}

static uint8_t * blob_at(const llmaas_kv_geom * geom, const int32_t * at, uint32_t n_cells, size_t * size) {
    *size = llmaas_blob_size(geom, n_cells);
    uint8_t * blob = exact(*size);
    fill_random(blob, *size);
    CHECK(llmaas_blob_init(geom, blob, *size, at, n_cells) == LLMAAS_OK);
    return blob;
}

static void check_sort(const llmaas_kv_geom * geom) {
    int32_t at[32];
    for (int32_t i = 0; i < 32; ++i) {
        at[i] = 3 * i - 20;
    }
    for (uint32_t round = 0; round < 60; ++round) {
        const uint32_t n_cells = 1 + rnd_below(32);
        uint32_t       order[2][32];
        size_t         size   = 0;
        uint8_t *      sorted = blob_at(geom, at, n_cells, &size);
        uint8_t *      mixed  = exact_copy(sorted, size);
        any_order(order[0], n_cells, round % 2);
        any_order(order[1], n_cells, round % 3);
        shuffle_cache(geom, mixed, sorted, order[0], n_cells, false);
        if (geom->n_first != 0) {
            shuffle_cache(geom, mixed, sorted, order[1], n_cells, true);
        }
        CHECK(llmaas_blob_sort(geom, mixed, size, n_cells) == LLMAAS_OK);
        CHECK(memcmp(mixed, sorted, size) == 0);
        free(mixed), free(sorted);
    }
}

static void check_cells_at_one_position(const llmaas_kv_geom * geom) {
    const int32_t  at[]    = {5, 3, 5, 3, 5};
    const uint32_t order[] = {1, 3, 0, 2, 4};
    size_t    size   = 0;
    uint8_t * mixed  = blob_at(geom, at, 5, &size);
    uint8_t * sorted = exact_copy(mixed, size);
    shuffle_cache(geom, sorted, mixed, order, 5, false);
    if (geom->n_first != 0) {
        shuffle_cache(geom, sorted, mixed, order, 5, true);
    }
    CHECK(llmaas_blob_sort(geom, mixed, size, 5) == LLMAAS_OK);
    CHECK(memcmp(mixed, sorted, size) == 0);
    free(mixed), free(sorted);
}

/* Check arbitrary bytes: they are sorted if they have the layout; else there is an error and no change. */
static void check_sort_of_anything(const llmaas_kv_geom * geom) {
    size_t    size  = 0;
    uint8_t * blob  = blob_new(geom, &size);
    uint8_t * found = exact(size);
    for (size_t bit = 0; bit < 8 * size; ++bit) {
        blob[bit / 8] ^= (uint8_t) (1u << bit % 8);
        memcpy(found, blob, size);
        const llmaas_status status = llmaas_blob_sort(geom, found, size, N_CELLS);
        const bool has_layout = llmaas_blob_check(geom, blob, size, NULL, N_CELLS) == LLMAAS_OK;
        CHECK(status == (has_layout ? LLMAAS_OK : LLMAAS_ECORRUPT));
        int32_t at[N_CELLS];
        CHECK(has_layout || memcmp(found, blob, size) == 0);
        CHECK(!has_layout || llmaas_blob_positions(found, size, at, N_CELLS) == LLMAAS_OK);
        for (int i = 1; has_layout && i < N_CELLS; ++i) {
            CHECK(at[i - 1] <= at[i]);
        }
        blob[bit / 8] ^= (uint8_t) (1u << bit % 8);
    }
    CHECK(llmaas_blob_sort(geom, blob, size - 1, N_CELLS) == LLMAAS_ECORRUPT);
    CHECK(llmaas_blob_sort(geom, blob, size, N_CELLS - 1) == LLMAAS_ECORRUPT);
    CHECK(llmaas_blob_sort(geom, blob, size, 0) == LLMAAS_EINVAL);
    CHECK(llmaas_blob_sort(geom, NULL, size, N_CELLS) == LLMAAS_EINVAL);
    free(found), free(blob);
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
        {3, 1, 1, 1, rows_k, rows_v, 2}, {3, 1, 0, 0, rows_f32, rows_f32, 1},
    };
    check_geometry();
    for (size_t g = 0; g < sizeof geoms / sizeof *geoms; ++g) {
        check_probe(&geoms[g]);
        check_check(&geoms[g]);
        check_sort(&geoms[g]);
        check_cells_at_one_position(&geoms[g]);
        check_sort_of_anything(&geoms[g]);
    }
    CHECK(strcmp(llmaas_status_name(LLMAAS_ESTALE), "LLMAAS_ESTALE") == 0 && strcmp(llmaas_status_name(99), "LLMAAS_UNKNOWN") == 0);
    return 0;
}
