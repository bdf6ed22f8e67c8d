/* Densities of positions that no graph evaluated: restored ones, and those of a context that was away. */
#include "attention_model.h"

#include "ggml-cpu.h"

static model * whole_model(void) {
    return model_new((shape){.type = GGML_TYPE_F32, .d = 40, .n_head = 4, .n_head_kv = 4, .mask_type = GGML_TYPE_F16,
                             .has_no_holes = true, .row_step = 1, .layer_step = 1, .n_threads = 3, .tolerance = 1e-5});
}

static void read_cells(model * m, uint32_t n, int32_t * cells) {
    CHECK(llmaas_density_cells(m->density, n, cells) == LLMAAS_OK);
}

static void test_restored_positions_are_counted(void) {
    model * m = whole_model();
    place(m, 0, 20, NULL);
    restore(m, 0, 20, true);
    evaluate(m, 20, 12);
    check_density(m);
    CHECK(m->counts[0] > 0);
    evaluate(m, 32, 1);
    check_density(m);
    model_free(m);
}

static void test_behind_a_kept_prefix(void) {
    model * m = whole_model();
    evaluate(m, 0, 25);
    forget_from(m, 12); /* their cells are filled again: by other positions, and by tokens that the tap does not know */
    place(m, 12, 30, NULL);
    restore(m, 12, 30, true);
    check_density(m);
    evaluate(m, 30, 5);
    check_density(m);
    CHECK(m->counts[11] > m->counts[12] && m->counts[12] > 0);
    model_free(m);
}

static void test_some_are_evaluated_instead(void) {
    model * m = whole_model();
    place(m, 0, 40, NULL);
    evaluate(m, 0, 4);
    restore(m, 4, 10, true);
    evaluate(m, 10, 6);
    check_density(m);
    restore(m, 16, 30, true); /* and the rest of 40 not at all */
    evaluate(m, 30, 5);
    check_density(m);
    evaluate(m, 35, 20);
    check_density(m);
    model_free(m);
}

static void test_restored_again_and_again(void) {
    model * m = whole_model();
    for (int n = 10; n < 50; n += 7) {
        forget_from(m, n / 2);
        place(m, (uint32_t) n / 2, (uint32_t) n, NULL);
        restore(m, n / 2, n, true);
        evaluate(m, n, 3);
        check_density(m);
        CHECK(m->counts[n - 1] > 0);
    }
    model_free(m);
}

/* Check two contexts whose cells lie between each other's. */
static void test_a_context_that_was_away(void) {
    model * m = whole_model();
    int32_t first[N_LAYER * 24], second[N_LAYER * 15];
    evaluate(m, 0, 20);
    read_cells(m, 20, first);
    switch_contexts(m);
    place(m, 0, 8, NULL);
    restore(m, 0, 8, true);
    evaluate(m, 8, 7);
    check_density(m);
    read_cells(m, 15, second);
    switch_contexts(m);
    place(m, 0, 20, first);
    check_density(m);
    evaluate(m, 20, 4);
    check_density(m);
    CHECK(m->counts[3] > 0);
    read_cells(m, 24, first);
    switch_contexts(m);
    place(m, 0, 15, second);
    evaluate(m, 15, 10);
    check_density(m);
    CHECK(m->counts[3] > 0);
    switch_contexts(m);
    place(m, 0, 24, first);
    evaluate(m, 24, 1);
    check_density(m);
    model_free(m);
}

/* Check a context that is parked right after it was restored, without an evaluation. */
static void test_away_before_its_cells_were_learned(void) {
    model * m = whole_model();
    int32_t cells[N_LAYER * 20];
    place(m, 0, 20, NULL);
    restore(m, 0, 20, true);
    read_cells(m, 20, cells);
    switch_contexts(m);
    place(m, 0, 0, NULL);
    evaluate(m, 0, 10);
    check_density(m);
    switch_contexts(m);
    place(m, 0, 20, cells);
    evaluate(m, 20, 5);
    check_density(m);
    CHECK(m->counts[19] > 0);
    model_free(m);
}

/* Check one cell more or fewer than announced: the tap cannot tell which one it is. */
static void check_unexplained(int n_placed, int n_restored) {
    model * m = whole_model();
    place(m, 0, (uint32_t) n_placed, NULL);
    restore(m, 0, n_restored, false);
    evaluate(m, 20, 10);
    check_density(m);
    CHECK(m->counts[0] == 0 && m->counts[20] > 0);
    evaluate(m, 30, 1);
    check_density(m);
    forget_from(m, 0);
    place(m, 0, 20, NULL);
    restore(m, 0, 20, true);
    evaluate(m, 20, 10);
    check_density(m);
    CHECK(m->counts[0] > 0);
    model_free(m);
}

static void test_unexplained_cells_are_not_counted(void) {
    check_unexplained(20, 19);
    check_unexplained(19, 20);

    model * m         = whole_model();
    m->of.has_no_holes = false; /* no query sees all of them */
    place(m, 0, 20, NULL);
    restore(m, 0, 20, false);
    evaluate(m, 20, 10);
    check_density(m);
    CHECK(m->counts[0] == 0 && m->counts[20] > 0);
    model_free(m);
}

static void test_cells_that_never_were_are_unknown(void) {
    const int32_t wrong[] = {N_CELLS, INT32_MAX, INT32_MIN, -3};
    model *       m       = whole_model();
    int32_t       cells[N_LAYER * 20], found[N_LAYER * 20];
    evaluate(m, 0, 20);
    for (int i = 0; i < N_LAYER * 20; ++i) {
        cells[i] = wrong[i % 4];
    }
    place(m, 0, 20, cells);
    read_cells(m, 20, found);
    for (int i = 0; i < N_LAYER * 20; ++i) {
        CHECK(found[i] == LLMAAS_CELL_UNKNOWN);
    }
    for (int i = 0; i < N_LAYER * 20; ++i) {
        cells[i] = 7; /* only one position can lie there */
    }
    place(m, 0, 20, cells);
    read_cells(m, 20, found);
    for (int i = 0; i < N_LAYER * 20; ++i) {
        CHECK(found[i] == (i % 20 == 19 ? 7 : LLMAAS_CELL_UNKNOWN));
    }
    model_free(m);
}

static void test_take_starts_again(void) {
    model *  m = whole_model();
    double   sums[10];
    uint64_t counts[10];
    evaluate(m, 0, 20);
    CHECK(llmaas_density_take(m->density, 10, sums, counts) == LLMAAS_OK);
    for (int i = 0; i < 10; ++i) {
        CHECK(counts[i] == m->counts[i] && sums[i] > 0.0);
        m->sums[i]   = 0.0;
        m->counts[i] = 0;
    }
    check_density(m);
    evaluate(m, 20, 5);
    check_density(m);
    CHECK(m->counts[0] > 0);
    model_free(m);
}

static void test_arguments(void) {
    model *  m = whole_model();
    int32_t  cells[1];
    double   sums[1];
    uint64_t counts[1];
    CHECK(llmaas_density_place(m->density, 2, 1, NULL) == LLMAAS_EINVAL);
    CHECK(llmaas_density_place(m->density, 0, N_POS + 1, NULL) == LLMAAS_EINVAL);
    CHECK(llmaas_density_cells(m->density, N_POS + 1, cells) == LLMAAS_EINVAL);
    CHECK(llmaas_density_take(m->density, N_POS + 1, sums, counts) == LLMAAS_EINVAL);
    CHECK(llmaas_density_place(m->density, N_POS, N_POS, NULL) == LLMAAS_OK);
    model_free(m);
}

int main(void) {
    ggml_cpu_init();
    test_restored_positions_are_counted();
    test_behind_a_kept_prefix();
    test_some_are_evaluated_instead();
    test_restored_again_and_again();
    test_a_context_that_was_away();
    test_away_before_its_cells_were_learned();
    test_unexplained_cells_are_not_counted();
    test_cells_that_never_were_are_unknown();
    test_take_starts_again();
    test_arguments();
    return 0;
}
