/* The shipped taps, on nodes that ggml built: density against sums in double precision, and the ring of states. */
#include "check.h"

#include "llmaas/tap.h"

#include "ggml-cpu.h"

#include <math.h>
#include <pthread.h>

enum { N_LAYER = 3, N_CELLS = 83, MAX_THREADS = 4, N_POS = 64 };

static float uniform(void) { return (float) (rnd() >> 40) / (float) (1 << 23) - 1.0f; }

/* -- a tap's threads: all at once on a node, and a barrier between nodes, as in ggml-cpu's pool -------------------- */

typedef struct pool {
    llmaas_tap              tap;
    const llmaas_tap_view * views;
    int                     n_views;
    int                     n_threads;
    pthread_barrier_t       barrier;
} pool;

typedef struct pool_thread {
    pool * pool;
    int    ith;
} pool_thread;

static void * pool_work(void * arg) {
    const pool_thread * self = arg;
    pool *              p    = self->pool;
    for (int i = 0; i < p->n_views; ++i) {
        pthread_barrier_wait(&p->barrier);
        p->tap.run(p->tap.user, &p->views[i], self->ith, p->n_threads);
    }
    return NULL;
}

static void run_tap(llmaas_tap tap, const llmaas_tap_view * views, int n_views, int n_threads) {
    pool        p = {.tap = tap, .views = views, .n_views = n_views, .n_threads = n_threads};
    pthread_t   threads[MAX_THREADS];
    pool_thread args[MAX_THREADS];
    CHECK(pthread_barrier_init(&p.barrier, NULL, (unsigned) n_threads) == 0);
    for (int i = 0; i < n_threads; ++i) {
        args[i] = (pool_thread){&p, i};
        CHECK(pthread_create(&threads[i], NULL, pool_work, &args[i]) == 0);
    }
    for (int i = 0; i < n_threads; ++i) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    pthread_barrier_destroy(&p.barrier);
}

/* -- a small model's attention ------------------------------------------------------------------------------------- */

typedef struct shape {
    enum ggml_type type; /* of keys */
    int            d, n_head, n_head_kv;
    float          softcap, max_bias;
    bool           has_sinks;
    bool           is_soft_max; /* no flash attention: ggml-cpu computes the probabilities */
    enum ggml_type mask_type;
    bool           has_head_masks;
    uint32_t       row_step, layer_step;
    int            n_threads;
    double         tolerance;
} shape;

typedef struct model {
    shape            of;
    llmaas_density * density;
    uint8_t *        keys[N_LAYER];           /* [N_CELLS][n_head_kv][d] of `type` */
    int              resident[N_LAYER][N_CELLS]; /* position of the token in a cell; -1: none */
    bool             is_noted[N_LAYER][N_CELLS]; /* the tap was there when it was stored */
    double           sums[N_POS];
    uint64_t         counts[N_POS];
} model;

static size_t key_size(const shape * of) { return ggml_row_size(of->type, of->d); }

static uint8_t * key_at(const model * m, int layer, int cell, int head) {
    return m->keys[layer] + ((size_t) cell * (size_t) m->of.n_head_kv + (size_t) head) * key_size(&m->of);
}

static model * model_new(shape of) {
    model * m = calloc(1, sizeof *m);
    CHECK(m);
    m->of      = of;
    m->density = llmaas_density_new(N_POS, N_LAYER, of.row_step, of.layer_step);
    CHECK(m->density);
    for (int layer = 0; layer < N_LAYER; ++layer) {
        m->keys[layer] = exact(N_CELLS * (size_t) of.n_head_kv * key_size(&of));
        memset(m->keys[layer], 0, N_CELLS * (size_t) of.n_head_kv * key_size(&of));
        memset(m->resident[layer], 0xff, sizeof m->resident[layer]);
    }
    return m;
}

static void model_free(model * m) {
    llmaas_density_free(m->density);
    for (int layer = 0; layer < N_LAYER; ++layer) {
        free(m->keys[layer]);
    }
    free(m);
}

/* Put a token's keys into a free cell, another one in each layer. */
static int store(model * m, int layer, int position) {
    int cell = (int) rnd_below(N_CELLS);
    while (m->resident[layer][cell] >= 0) {
        cell = (cell + 1) % N_CELLS;
    }
    m->resident[layer][cell] = position;
    m->is_noted[layer][cell] = m->density != NULL;
    for (int head = 0; head < m->of.n_head_kv; ++head) {
        float key[256];
        for (int i = 0; i < m->of.d; ++i) {
            key[i] = 2.0f * uniform();
        }
        ggml_get_type_traits_cpu(m->of.type)->from_float(key, key_at(m, layer, cell, head), m->of.d);
    }
    return cell;
}

static void forget_from(model * m, int position) {
    for (int layer = 0; layer < N_LAYER; ++layer) {
        for (int cell = 0; cell < N_CELLS; ++cell) {
            if (m->resident[layer][cell] >= position) {
                m->resident[layer][cell] = -1;
            }
        }
    }
}

/* What the mask adds; causal, with a hole here and there, distances for ALiBi, and now and then one head differs. */
static float mask_at(const model * m, int layer, int cell, int position, int head) {
    const int  at      = m->resident[layer][cell];
    const bool is_hole = (at * 7 + position) % 11 == 3 || (m->of.has_head_masks && (at + head) % 5 == 4);
    if (at < 0 || at > position || (is_hole && at != position)) {
        return -INFINITY;
    }
    return m->of.max_bias > 0.0f ? (float) (at - position) : 0.0f;
}

static double slope(const shape * of, int head) {
    if (of->max_bias <= 0.0f) {
        return 1.0;
    }
    const int n = 1 << (int) floor(log2(of->n_head));
    return head < n ? pow(2.0, -(double) of->max_bias * (head + 1) / n)
                    : pow(2.0, -(double) of->max_bias / 2.0 * (2 * (head - n) + 1) / n);
}

/* As the key's type sees it: what ggml-cpu rounds a query to before it multiplies. */
static void round_query(const shape * of, const float * query, float * rounded) {
    const enum ggml_type type = ggml_get_type_traits_cpu(of->type)->vec_dot_type;
    uint8_t *            tmp  = exact(ggml_row_size(type, of->d));
    ggml_get_type_traits_cpu(type)->from_float(query, tmp, of->d);
    if (type == GGML_TYPE_F32) {
        memcpy(rounded, tmp, sizeof(float) * (size_t) of->d);
    } else {
        ggml_get_type_traits(type)->to_float(tmp, rounded, of->d);
    }
    free(tmp);
}

static double dot(const model * m, int layer, int cell, int head, const float * query) {
    float           key[256];
    const uint8_t * from = key_at(m, layer, cell, head / (m->of.n_head / m->of.n_head_kv));
    if (m->of.type == GGML_TYPE_F32) {
        memcpy(key, from, sizeof(float) * (size_t) m->of.d);
    } else {
        ggml_get_type_traits(m->of.type)->to_float(from, key, m->of.d);
    }
    double sum = 0.0;
    for (int i = 0; i < m->of.d; ++i) {
        sum += (double) key[i] * (double) query[i];
    }
    return sum;
}

/* Eq 1's numerator and denominator, one query and head at a time. */
static void expect_row(model * m, int layer, int position, int head, const float * query, const float * sinks) {
    float  rounded[256];
    double scores[N_CELLS];
    double sum = sinks ? exp((double) sinks[head]) : 0.0;
    round_query(&m->of, query, rounded);
    for (int cell = 0; cell < N_CELLS; ++cell) {
        const double bias = (double) mask_at(m, layer, cell, position, head);
        double       s    = dot(m, layer, cell, head, rounded) / sqrt(m->of.d);
        if (m->of.softcap != 0.0f) {
            s = (double) m->of.softcap * tanh(s / (double) m->of.softcap);
        }
        scores[cell] = exp(s + slope(&m->of, head) * bias);
        sum += scores[cell];
    }
    for (int cell = 0; cell < N_CELLS; ++cell) {
        const int at = m->resident[layer][cell];
        if (scores[cell] > 0.0 && at < N_POS && m->is_noted[layer][cell]) {
            m->sums[at] += scores[cell] / sum;
            m->counts[at] += 1;
        }
    }
}

static struct ggml_tensor * build_mask(struct ggml_context * ctx, const model * m, int layer, int from, int n_tokens) {
    const int            n_masks = m->of.has_head_masks ? m->of.n_head : 1;
    struct ggml_tensor * mask    = ggml_new_tensor_4d(ctx, m->of.mask_type, N_CELLS, n_tokens, n_masks, 1);
    for (int i = 0; i < N_CELLS * n_tokens * n_masks; ++i) {
        const int   cell = i % N_CELLS;
        const int   row  = i / N_CELLS % n_tokens;
        const float v    = mask_at(m, layer, cell, from + row, i / N_CELLS / n_tokens);
        if (mask->type == GGML_TYPE_F16) {
            ((ggml_fp16_t *) mask->data)[i] = ggml_fp32_to_fp16(v);
        } else {
            ((float *) mask->data)[i] = v;
        }
    }
    return mask;
}

/* The attention node of a layer as llama.cpp builds it: queries and keys are permuted views. */
static struct ggml_tensor * build_node(
    struct ggml_context * ctx, const model * m, int layer, struct ggml_tensor * query, struct ggml_tensor * mask,
    struct ggml_tensor * sinks) {
    const shape *        of    = &m->of;
    const float          scale = 1.0f / sqrtf((float) of->d);
    struct ggml_tensor * keys  = ggml_new_tensor_3d(ctx, of->type, of->d, of->n_head_kv, N_CELLS);
    keys->data                    = m->keys[layer]; /* ASan sees what is read beyond the last cell */
    struct ggml_tensor * q = ggml_permute(ctx, query, 0, 2, 1, 3);
    struct ggml_tensor * k = ggml_permute(ctx, keys, 0, 2, 1, 3);
    if (!of->is_soft_max) {
        struct ggml_tensor * node = ggml_flash_attn_ext(ctx, q, k, k, mask, scale, of->max_bias, of->softcap);
        ggml_flash_attn_ext_add_sinks(node, sinks);
        return node;
    }
    struct ggml_tensor * kq = ggml_mul_mat(ctx, k, q);
    if (of->softcap != 0.0f) {
        kq = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, kq, scale / of->softcap)), of->softcap);
    }
    struct ggml_tensor * node = ggml_soft_max_ext(ctx, kq, mask, of->softcap != 0.0f ? 1.0f : scale, of->max_bias);
    ggml_soft_max_add_sinks(node, sinks);
    struct ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, node);
    CHECK(ggml_graph_compute_with_ctx(ctx, graph, 1) == GGML_STATUS_SUCCESS);
    return node;
}

static struct ggml_context * context_new(void) {
    struct ggml_context * ctx = ggml_init((struct ggml_init_params){.mem_size = 16u << 20});
    CHECK(ctx);
    return ctx;
}

/* Evaluate tokens at positions from.. in one graph, and add up what the tap ought to. */
static void evaluate(model * m, int from, int n_tokens) {
    struct ggml_context * ctx       = context_new();
    struct ggml_tensor *  positions = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_tokens);
    struct ggml_tensor *  sinks     = m->of.has_sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, m->of.n_head) : NULL;
    llmaas_tap_view       views[N_LAYER];
    int                   n_views = 0;
    for (int i = 0; i < n_tokens; ++i) {
        ((int32_t *) positions->data)[i] = from + i;
    }
    for (int head = 0; sinks && head < m->of.n_head; ++head) {
        ((float *) sinks->data)[head] = uniform();
    }
    for (int layer = 0; layer < N_LAYER; ++layer) {
        struct ggml_tensor * cells = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n_tokens);
        struct ggml_tensor * query = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, m->of.d, m->of.n_head, n_tokens);
        for (int i = 0; i < n_tokens; ++i) {
            ((int64_t *) cells->data)[i] = store(m, layer, from + i);
        }
        for (int64_t i = 0; i < ggml_nelements(query); ++i) {
            ((float *) query->data)[i] = uniform();
        }
        if (!m->density || !llmaas_density_tap(m->density).wants(m->density, layer)) {
            continue;
        }
        for (int i = 0; n_views == 0 && i < n_tokens && from + i < N_POS; ++i) {
            m->sums[from + i]   = 0.0;
            m->counts[from + i] = 0;
        }
        for (int row = 0; row < n_tokens * m->of.n_head; ++row) {
            const int position = from + row / m->of.n_head;
            if ((uint32_t) position % m->of.row_step == m->of.row_step - 1) {
                expect_row(m, layer, position, row % m->of.n_head, (const float *) query->data + row * m->of.d,
                           sinks ? sinks->data : NULL);
            }
        }
        struct ggml_tensor * mask = build_mask(ctx, m, layer, from, n_tokens);
        views[n_views]            = (llmaas_tap_view){
                       .kind      = LLMAAS_TAP_ATTENTION,
                       .layer     = layer,
                       .is_first  = n_views == 0,
                       .node      = build_node(ctx, m, layer, query, mask, sinks),
                       .cells     = cells,
                       .positions = positions,
        };
        ++n_views;
    }
    if (m->density) {
        run_tap(llmaas_density_tap(m->density), views, n_views, m->of.n_threads);
    }
    ggml_free(ctx);
}

static void check_density(const model * m) {
    double   sums[N_POS];
    uint64_t counts[N_POS];
    CHECK(llmaas_density_read(m->density, N_POS, sums, counts) == LLMAAS_OK);
    for (int i = 0; i < N_POS; ++i) {
        CHECK(counts[i] == m->counts[i]);
        CHECK(fabs(sums[i] - m->sums[i]) <= m->of.tolerance * m->sums[i]);
    }
}

static shape f32_shape(void) {
    return (shape){.type = GGML_TYPE_F32, .d = 40, .n_head = 4, .n_head_kv = 4, .mask_type = GGML_TYPE_F16,
                   .row_step = 1, .layer_step = 1, .n_threads = 3, .tolerance = 1e-5};
}

/* A prompt in two graphs, then some tokens one by one. With one thread, that one has enough queries to make tiles of
 * keys worth it; with three, they are multiplied one by one. */
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

/* -- density ------------------------------------------------------------------------------------------------------- */

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
    of.row_step = 1000; /* no row: nothing is counted, whoever asks */
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
    evaluate(m, 3, 5); /* no sampled row, but 3 to 7 are new tokens in other cells */
    check_density(m);
    evaluate(m, 8, 20);
    check_density(m);
    CHECK(m->counts[4] > 0);
    model_free(m);
}

static void test_unknown_cells_count_in_the_denominator_only(void) {
    model *          m       = model_new(f32_shape());
    llmaas_density * density = m->density;
    m->density               = NULL; /* nobody listens yet */
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

/* A node whose probabilities are all 1 / n_kv. */
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
    struct ggml_tensor * cells    = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 2); /* a position is a cell */
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
        total_count(r->density); /* sums and counts belong together */
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

/* -- states -------------------------------------------------------------------------------------------------------- */

enum { N_EMBD = 24 };

/* Rows whose every float is first, first + 1, ... */
static struct ggml_tensor * numbered_rows(struct ggml_context * ctx, int n_embd, int n_rows, int first) {
    struct ggml_tensor * rows = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_embd, n_rows);
    for (int i = 0; i < n_embd * n_rows; ++i) {
        ((float *) rows->data)[i] = (float) (first + i / n_embd);
    }
    return rows;
}

static void put_rows(llmaas_states * states, const struct ggml_tensor * rows) {
    const llmaas_tap_view view = {.kind = LLMAAS_TAP_FINAL_NORM, .layer = -1, .is_first = true, .states = rows};
    run_tap(llmaas_states_tap(states), &view, 1, 3);
}

/* Take at most n rows: they are first, first + 1, ... */
static void check_taken(llmaas_states * states, uint32_t n, uint32_t n_expected, int first, uint64_t n_lost_expected) {
    float *  rows = (float *) (void *) exact(sizeof(float) * N_EMBD * n);
    uint32_t n_taken;
    uint64_t n_lost;
    CHECK(llmaas_states_take(states, n, rows, &n_taken, &n_lost) == LLMAAS_OK);
    CHECK(n_taken == n_expected && n_lost == n_lost_expected);
    for (uint32_t i = 0; i < n_taken * N_EMBD; ++i) {
        CHECK(rows[i] == (float) (first + (int) (i / N_EMBD)));
    }
    free(rows);
}

static void test_states_come_out_in_order(void) {
    struct ggml_context * ctx    = context_new();
    llmaas_states *       states = llmaas_states_new(LLMAAS_TAP_FINAL_NORM, 0, N_EMBD, 10);
    check_taken(states, 5, 0, 0, 0);
    put_rows(states, numbered_rows(ctx, N_EMBD, 4, 0));
    put_rows(states, numbered_rows(ctx, N_EMBD, 3, 4));
    check_taken(states, 5, 5, 0, 0);
    put_rows(states, numbered_rows(ctx, N_EMBD, 8, 7)); /* around the ring's end */
    check_taken(states, 20, 10, 5, 0);
    llmaas_states_free(states);
    ggml_free(ctx);
}

static void test_a_full_ring_loses_the_oldest_states(void) {
    struct ggml_context * ctx    = context_new();
    llmaas_states *       states = llmaas_states_new(LLMAAS_TAP_FINAL_NORM, 0, N_EMBD, 10);
    put_rows(states, numbered_rows(ctx, N_EMBD, 7, 0));
    put_rows(states, numbered_rows(ctx, N_EMBD, 7, 7));
    check_taken(states, 1, 1, 4, 4);
    put_rows(states, numbered_rows(ctx, N_EMBD, 25, 14)); /* more than it holds */
    check_taken(states, 20, 10, 29, 24);
    check_taken(states, 20, 0, 0, 0);
    put_rows(states, numbered_rows(ctx, N_EMBD + 1, 2, 0)); /* not the width it was made for */
    check_taken(states, 20, 0, 0, 2);
    llmaas_states_free(states);
    ggml_free(ctx);
}

static void test_states_may_be_strided(void) {
    struct ggml_context * ctx    = context_new();
    llmaas_states *       states = llmaas_states_new(LLMAAS_TAP_FFN_INPUT, 2, N_EMBD, 10);
    struct ggml_tensor *  all    = numbered_rows(ctx, N_EMBD, 6, 0);
    put_rows(states, ggml_view_3d(ctx, all, N_EMBD, 1, 3, all->nb[1], 2 * all->nb[1], all->nb[1])); /* 1, 3, 5 */
    check_taken(states, 1, 1, 1, 0);
    check_taken(states, 1, 1, 3, 0);
    check_taken(states, 1, 1, 5, 0);
    llmaas_states_free(states);
    ggml_free(ctx);
}

typedef struct producer {
    llmaas_states * states;
    int             n_rows;
} producer;

static void * keep_putting(void * arg) {
    const producer *      p   = arg;
    struct ggml_context * ctx = context_new();
    llmaas_tap_view       views[200];
    for (int i = 0; i < 200; ++i) {
        struct ggml_tensor * rows = numbered_rows(ctx, N_EMBD, p->n_rows, i * p->n_rows);
        views[i] = (llmaas_tap_view){.kind = LLMAAS_TAP_FINAL_NORM, .layer = -1, .is_first = true, .states = rows};
    }
    run_tap(llmaas_states_tap(p->states), views, 200, 2);
    ggml_free(ctx);
    return NULL;
}

static void test_states_taken_while_graphs_run_are_whole(void) {
    producer  p = {.states = llmaas_states_new(LLMAAS_TAP_FINAL_NORM, 0, N_EMBD, 16), .n_rows = 5};
    pthread_t thread;
    uint64_t  n_seen = 0;
    CHECK(pthread_create(&thread, NULL, keep_putting, &p) == 0);
    while (n_seen < 1000) {
        float    rows[7 * N_EMBD];
        uint32_t n_taken;
        uint64_t n_lost;
        CHECK(llmaas_states_take(p.states, 7, rows, &n_taken, &n_lost) == LLMAAS_OK);
        n_seen += n_lost;
        for (uint32_t i = 0; i < n_taken * N_EMBD; ++i) {
            CHECK(rows[i] == (float) (n_seen + i / N_EMBD));
        }
        n_seen += n_taken;
    }
    CHECK(n_seen == 1000);
    CHECK(pthread_join(thread, NULL) == 0);
    llmaas_states_free(p.states);
}

static void test_states_arguments(void) {
    CHECK(!llmaas_states_new(LLMAAS_TAP_ATTENTION, 0, N_EMBD, 4));
    CHECK(!llmaas_states_new(LLMAAS_TAP_FINAL_NORM, 0, 0, 4));
    CHECK(!llmaas_states_new(LLMAAS_TAP_FINAL_NORM, 0, N_EMBD, 0));
    llmaas_states *  states = llmaas_states_new(LLMAAS_TAP_FFN_INPUT, 2, N_EMBD, 4);
    const llmaas_tap tap    = llmaas_states_tap(states);
    CHECK(tap.kind == LLMAAS_TAP_FFN_INPUT && tap.wants(tap.user, 2) && !tap.wants(tap.user, 1));
    uint32_t n_taken;
    uint64_t n_lost;
    CHECK(llmaas_states_take(states, 1, NULL, &n_taken, &n_lost) == LLMAAS_EINVAL);
    llmaas_states_free(states);
    llmaas_states_free(NULL);
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
    test_states_come_out_in_order();
    test_a_full_ring_loses_the_oldest_states();
    test_states_may_be_strided();
    test_states_taken_while_graphs_run_are_whole();
    test_states_arguments();
    return 0;
}
