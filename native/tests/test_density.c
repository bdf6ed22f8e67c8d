/* The density tap on nodes built by ggml, compared with sums in double precision. */
#include "attention_model.h"

#include "ggml-cpu.h"

#include <math.h>

static shape f32_shape(void) {
    return (shape){.type = GGML_TYPE_F32, .d = 40, .n_head = 4, .n_head_kv = 4, .mask_type = GGML_TYPE_F16,
                   .row_step = 1, .layer_step = 1, .n_threads = 3, .tolerance = 1e-5};
}

/* Check a prompt in two graphs, then some tokens one by one. With one thread, it has enough queries to make tiles of
 * keys worthwhile; with three threads, queries are multiplied one by one. */
static void check_generation_on(shape of, int n_threads) {
    of.n_threads = n_threads;
    model * m    = model_new(of);
    evaluate(m, 0, 21);
    check_density(m);
    evaluate(m, 21, 12);
    check_density(m);
    for (int i = 33; i < 37; ++i) {
        evaluate(m, i, 1);
        check_density(m);
    }
    CHECK(m->counts[0] > 0);
    model_free(m);
}

static void check_generation(shape of) {
    check_generation_on(of, 1);
    check_generation_on(of, 3);
}

static void test_density_is_eq1(void) {
    check_generation(f32_shape());

    shape f16     = f32_shape();
    f16.type      = GGML_TYPE_F16;
    f16.d         = 64;
    f16.n_head    = 8;
    f16.n_head_kv = 2;
    f16.tolerance = 1e-3;
    check_generation(f16);

    shape q8_0 = f16;
    q8_0.type  = GGML_TYPE_Q8_0;
    check_generation(q8_0);

    shape q5_1 = f16; /* its queries are rounded to a type that does not convert to floats: no tiles */
    q5_1.type  = GGML_TYPE_Q5_1;
    check_generation(q5_1);
}

static void test_scores_are_those_of_flash_attention(void) {
    shape capped   = f32_shape();
    capped.softcap = 1.5f;
    check_generation(capped);

    shape alibi    = f32_shape();
    alibi.n_head   = 12; /* not a power of two: two kinds of slope */
    alibi.max_bias = 8.0f;
    check_generation(alibi);

    shape sinks     = f32_shape();
    sinks.has_sinks = true;
    check_generation(sinks);

    shape masks          = f32_shape();
    masks.has_head_masks = true;
    check_generation(masks);
}

static void test_softmax_nodes_hold_the_probabilities(void) {
    shape of       = f32_shape();
    of.is_soft_max = true;
    of.mask_type   = GGML_TYPE_F32;
    of.n_head      = 12;
    check_generation(of);
    of.max_bias  = 8.0f;
    of.has_sinks = true;
    of.mask_type = GGML_TYPE_F16;
    check_generation(of);
    of.softcap = 1.5f;
    check_generation(of);
}

static void test_only_sampled_rows_and_layers_are_counted(void) {
    shape of      = f32_shape();
    of.row_step   = 5;
    of.layer_step = 2;
    check_generation(of);
    of.layer_step = 1;
    of.n_head_kv  = 2;
    check_generation(of);
    shape computed       = of;
    computed.is_soft_max = true;
    check_generation(computed);
    of.row_step = 1000; /* no row is sampled, so nothing is counted */
    model * m   = model_new(of);
    evaluate(m, 0, 30);
    check_density(m);
    CHECK(m->counts[0] == 0);
    model_free(m);
}

static void test_a_position_evaluated_again_starts_at_zero(void) {
    model * m = model_new(f32_shape());
    evaluate(m, 0, 30);
    forget_from(m, 17);
    evaluate(m, 17, 9);
    check_density(m);
    forget_from(m, 25);
    evaluate(m, 25, 1);
    check_density(m);
    model_free(m);

    shape sampled    = f32_shape();
    sampled.row_step = 16;
    m                = model_new(sampled);
    evaluate(m, 0, 30);
    forget_from(m, 3);
    evaluate(m, 3, 5); /* hardly a sampled row, but 3 to 7 are new tokens in other cells */
    check_density(m);
    evaluate(m, 8, 20);
    check_density(m);
    CHECK(m->counts[4] > 0);
    model_free(m);
}

static void test_unknown_cells_count_in_the_denominator_only(void) {
    model *          m       = model_new(f32_shape());
    llmaas_density * density = m->density;
    m->density               = NULL; /* no tap is subscribed yet */
    evaluate(m, 0, 10);
    m->density = density;
    evaluate(m, 10, 20);
    check_density(m);
    CHECK(m->counts[9] == 0 && m->counts[10] > 0);
    model_free(m);
}

static void test_positions_beyond_the_last_are_not_counted(void) {
    model * m = model_new(f32_shape());
    evaluate(m, N_POS - 20, 30);
    check_density(m);
    CHECK(m->counts[N_POS - 1] > 0);
    model_free(m);
}

static void test_reset_forgets_sums_and_cells(void) {
    model * m = model_new(f32_shape());
    evaluate(m, 0, 20);
    llmaas_density_reset(m->density);
    memset(m->sums, 0, sizeof m->sums);
    memset(m->counts, 0, sizeof m->counts);
    memset(m->is_noted, 0, sizeof m->is_noted);
    check_density(m);
    evaluate(m, 20, 5);
    check_density(m);
    model_free(m);
}

/* Return a node whose probabilities are all 1 / n_kv. */
static llmaas_tap_view even_view(struct ggml_context * ctx, int n_kv, int n_tokens, int n_stream) {
    struct ggml_tensor * kq = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, n_kv, n_tokens, 1, n_stream);
    struct ggml_tensor * p  = ggml_soft_max(ctx, kq);
    for (int64_t i = 0; i < ggml_nelements(p); ++i) {
        ((float *) p->data)[i] = 1.0f / (float) n_kv;
    }
    return (llmaas_tap_view){.kind = LLMAAS_TAP_ATTENTION, .layer = 0, .is_first = true, .node = p};
}

static uint64_t total_count(llmaas_density * density) {
    double   sums[N_POS];
    uint64_t counts[N_POS];
    uint64_t n = 0;
    CHECK(llmaas_density_read(density, N_POS, sums, counts) == LLMAAS_OK);
    for (int i = 0; i < N_POS; ++i) {
        CHECK(fabs(sums[i] - (double) counts[i] / 8.0) < 1e-9);
        n += counts[i];
    }
    return n;
}

static void test_tokens_without_a_cache_or_positions(void) {
    struct ggml_context * ctx     = context_new();
    llmaas_density *      density = llmaas_density_new(N_POS, 1, 1, 1);
    llmaas_tap_view       view    = even_view(ctx, 8, 8, 1); /* column j is token j */
    run_tap(llmaas_density_tap(density), &view, 1, 2);
    CHECK(total_count(density) == 8 * 8);

    llmaas_density_reset(density);
    view                          = even_view(ctx, 8, 2, 1);
    struct ggml_tensor * cells    = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 2); /* position equals cell */
    ((int64_t *) cells->data)[0]  = 6;
    ((int64_t *) cells->data)[1]  = 3;
    view.cells                    = cells;
    run_tap(llmaas_density_tap(density), &view, 1, 2);
    CHECK(total_count(density) == 2 * 2);
    llmaas_density_free(density);
    ggml_free(ctx);
}

static struct ggml_tensor * one_cell(struct ggml_context * ctx, int64_t cell) {
    struct ggml_tensor * cells = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 1);
    memcpy(cells->data, &cell, sizeof cell);
    return cells;
}

static void test_columns_that_are_no_cells_are_not_counted(void) {
    struct ggml_context * ctx     = context_new();
    llmaas_density *      density = llmaas_density_new(N_POS, 1, 1, 1);
    llmaas_tap_view       views[4];
    views[0]       = even_view(ctx, 8, 1, 1);
    views[0].cells = one_cell(ctx, 7);
    views[1]       = even_view(ctx, 8, 2, 1); /* keys of other tokens */
    views[2]       = even_view(ctx, 8, 8, 2); /* two caches */
    views[3]       = even_view(ctx, 8, 1, 1); /* the second of two caches */
    views[3].cells = one_cell(ctx, 8);
    run_tap(llmaas_density_tap(density), views, 4, 2);
    CHECK(total_count(density) == 1);
    llmaas_density_free(density);
    ggml_free(ctx);
}

typedef struct reader {
    llmaas_density * density;
    bool             is_done;
    pthread_mutex_t  mutex;
} reader;

static bool reader_is_done(reader * r) {
    pthread_mutex_lock(&r->mutex);
    const bool is_done = r->is_done;
    pthread_mutex_unlock(&r->mutex);
    return is_done;
}

static void * keep_reading(void * arg) {
    reader * r = arg;
    while (!reader_is_done(r)) {
        total_count(r->density); /* sums and counts must match */
    }
    return NULL;
}

static void test_read_while_a_graph_runs(void) {
    struct ggml_context * ctx = context_new();
    reader                r   = {.density = llmaas_density_new(N_POS, 1, 1, 1), .mutex = PTHREAD_MUTEX_INITIALIZER};
    llmaas_tap_view       views[100];
    pthread_t             thread;
    CHECK(pthread_create(&thread, NULL, keep_reading, &r) == 0);
    for (int i = 0; i < 100; ++i) {
        views[i] = even_view(ctx, 8, 8, 1);
    }
    run_tap(llmaas_density_tap(r.density), views, 100, MAX_THREADS);
    pthread_mutex_lock(&r.mutex);
    r.is_done = true;
    pthread_mutex_unlock(&r.mutex);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(total_count(r.density) == 8 * 8);
    llmaas_density_free(r.density);
    ggml_free(ctx);
}

static void test_density_arguments(void) {
    CHECK(!llmaas_density_new(8, 1, 0, 1));
    CHECK(!llmaas_density_new(8, 1, 1, 0));
    llmaas_density * density = llmaas_density_new(8, 4, 1, 4);
    const llmaas_tap tap     = llmaas_density_tap(density);
    CHECK(!tap.wants(tap.user, 0) && tap.wants(tap.user, 3) && !tap.wants(tap.user, 7) && !tap.wants(tap.user, -1));
    double   sums[9];
    uint64_t counts[9];
    CHECK(llmaas_density_read(density, 9, sums, counts) == LLMAAS_EINVAL);
    CHECK(llmaas_density_read(density, 8, sums, counts) == LLMAAS_OK);
    llmaas_density_free(density);
    llmaas_density_free(NULL);
}

int main(void) {
    ggml_cpu_init();
    test_density_is_eq1();
    test_scores_are_those_of_flash_attention();
    test_softmax_nodes_hold_the_probabilities();
    test_only_sampled_rows_and_layers_are_counted();
    test_a_position_evaluated_again_starts_at_zero();
    test_unknown_cells_count_in_the_denominator_only();
    test_positions_beyond_the_last_are_not_counted();
    test_reset_forgets_sums_and_cells();
    test_tokens_without_a_cache_or_positions();
    test_columns_that_are_no_cells_are_not_counted();
    test_read_while_a_graph_runs();
    test_density_arguments();
    return 0;
}
