/* Engines on many threads, under ThreadSanitizer (tsan.sh): what llama.cpp does with ggml, done here without it.
 *
 *     engine_threads n_rounds
 *
 * Workers create contexts, evaluate tokens on two threads each, and free them again; meanwhile others switch levels,
 * listen, read what was heard, load models, and evaluate on a plain CPU backend. */
#include "check.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llmaas/engine.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

enum { N_LAYER = 2, D = 128, FF = 256, HEAD = 32, N_HEAD = 4, N_HEAD_KV = 2, D_KV = HEAD * N_HEAD_KV, N_OUT = 96 };
enum { N_CTX = 64, N_GRAPH = 512, N_WORKERS = 3, N_MODELS = 3 };

/* -- models -------------------------------------------------------------------------------------------------------- */

typedef enum weight_kind { ATTN_NORM, Q, K, V, OUT, FFN_NORM, GATE, UP, DOWN, N_KINDS } weight_kind;

static const struct {
    const char * name;
    int          n_columns, n_rows;
} shapes[N_KINDS] = {
    {"attn_norm", D, 1}, {"attn_q", D, D},   {"attn_k", D, D_KV},  {"attn_v", D, D_KV},   {"attn_output", D, D},
    {"ffn_norm", D, 1},  {"ffn_gate", D, FF}, {"ffn_up", D, FF}, {"ffn_down", FF, D},
};

/* Where the feed-forward weights are: as ggml-cpu repacks them, in tiles, or in a file. */
typedef enum model_kind { REPACKED, TILED, ON_DISK } model_kind;

typedef struct model {
    model_kind            kind;
    llmaas_weights *      weights;
    struct ggml_context * plain_ctx, * special_ctx;
    ggml_backend_buffer_t plain_buffer, special_buffer;
    struct ggml_tensor *  tensors[N_LAYER][N_KINDS];
    struct ggml_tensor *  norm, * output;
    char                  path[32];
} model;

static struct ggml_context * new_context(size_t n_tensors) {
    const size_t size = n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(N_GRAPH, false);
    struct ggml_context * ctx = ggml_init((struct ggml_init_params){.mem_size = size, .no_alloc = true});
    CHECK(ctx);
    return ctx;
}

static ggml_backend_buffer_type_t repack_type(void) {
    const ggml_backend_reg_t           reg = ggml_backend_cpu_reg();
    ggml_backend_dev_get_extra_bufts_t get;
    *(void **) &get = ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * type = get(ggml_backend_reg_dev_get(reg, 0)); type && *type; ++type) {
        if (strcmp(ggml_backend_buft_name(*type), "CPU_REPACK") == 0) {
            return *type;
        }
    }
    return ggml_backend_cpu_buffer_type();
}

/* Values that depend on the size only, so that every model computes the same. */
static uint8_t * weight_bytes(const struct ggml_tensor * tensor) {
    const int64_t n      = ggml_nelements(tensor);
    float *       values = malloc((size_t) n * sizeof *values);
    for (int64_t i = 0; i < n; ++i) {
        values[i] = (float) ((uint64_t) i * 2654435761u % 1000) / 5000.0f - 0.1f;
    }
    uint8_t * bytes = exact(ggml_nbytes(tensor));
    if (tensor->type == GGML_TYPE_F32) {
        memcpy(bytes, values, ggml_nbytes(tensor));
    } else {
        ggml_quantize_chunk(tensor->type, values, bytes, 0, tensor->ne[1], tensor->ne[0], NULL);
    }
    free(values);
    return bytes;
}

/* Claim a feed-forward weight; the file has all of them one after the other. */
static void claim(model * m, const struct ggml_tensor * tensor, bool is_input, int fd, uint64_t * offset) {
    static const int64_t extents[] = {0, 96, 64, 32};
    const llmaas_axis    axis      = is_input ? LLMAAS_COLUMNS : LLMAAS_ROWS;
    CHECK(llmaas_weights_claim_part(m->weights, tensor->name, axis, extents, 4) == LLMAAS_OK);
    if (m->kind == TILED) {
        CHECK(llmaas_weights_claim_tiles(m->weights, tensor->name) == LLMAAS_OK);
    }
    if (m->kind == ON_DISK) {
        uint8_t * bytes = weight_bytes(tensor);
        CHECK(write(fd, bytes, ggml_nbytes(tensor)) == (ssize_t) ggml_nbytes(tensor));
        CHECK(llmaas_weights_claim_file(m->weights, tensor->name, m->path, *offset) == LLMAAS_OK);
        *offset += ggml_nbytes(tensor);
        free(bytes);
    }
}

static void add_layer(model * m, int layer, int fd, uint64_t * offset) {
    for (int kind = 0; kind < N_KINDS; ++kind) {
        const bool            is_norm = shapes[kind].n_rows == 1;
        struct ggml_context * ctx     = kind >= GATE ? m->special_ctx : m->plain_ctx;
        struct ggml_tensor *  tensor  = ggml_new_tensor_2d(
            ctx, is_norm ? GGML_TYPE_F32 : GGML_TYPE_Q4_0, shapes[kind].n_columns, shapes[kind].n_rows);
        ggml_format_name(tensor, "blk.%d.%s.weight", layer, shapes[kind].name);
        m->tensors[layer][kind] = tensor;
        if (kind >= GATE) {
            claim(m, tensor, kind == DOWN, fd, offset);
        }
    }
}

static ggml_backend_buffer_t fill(struct ggml_context * ctx, ggml_backend_buffer_type_t type) {
    const ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, type);
    CHECK(buffer);
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    for (struct ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        uint8_t * bytes = weight_bytes(t);
        ggml_backend_tensor_set(t, bytes, 0, ggml_nbytes(t));
        free(bytes);
    }
    return buffer;
}

static void load(model * m, model_kind kind) {
    uint64_t offset = 0;
    *m              = (model){.kind = kind, .weights = llmaas_weights_new(), .path = "/tmp/engine_threads.XXXXXX"};
    const int fd    = mkstemp(m->path);
    CHECK(fd >= 0 && m->weights);
    m->plain_ctx   = new_context(N_LAYER * N_KINDS + 2);
    m->special_ctx = new_context(N_LAYER * N_KINDS);
    for (int layer = 0; layer < N_LAYER; ++layer) {
        add_layer(m, layer, fd, &offset);
    }
    CHECK(close(fd) == 0 && unlink(m->path) == 0);
    m->norm   = ggml_set_name(ggml_new_tensor_2d(m->plain_ctx, GGML_TYPE_F32, D, 1), "output_norm.weight");
    m->output = ggml_set_name(ggml_new_tensor_2d(m->plain_ctx, GGML_TYPE_Q4_0, D, N_OUT), "output.weight");
    llmaas_load_begin(m->weights);
    m->plain_buffer   = fill(m->plain_ctx, ggml_backend_cpu_buffer_type());
    m->special_buffer = fill(m->special_ctx, kind == REPACKED ? repack_type() : llmaas_buffer_type());
    llmaas_load_end();
    CHECK(!llmaas_weights_problem(m->weights, false));
}

static void unload(model * m) {
    ggml_backend_buffer_free(m->plain_buffer);
    ggml_backend_buffer_free(m->special_buffer);
    ggml_free(m->plain_ctx);
    ggml_free(m->special_ctx);
    llmaas_weights_release(m->weights);
}

/* -- contexts ------------------------------------------------------------------------------------------------------ */

typedef struct context {
    const model *         of;
    bool                  is_flash;
    ggml_backend_t        backends[2]; /* the engine, or a plain one, and the CPU's as llama.cpp's last resort */
    ggml_backend_sched_t  sched;
    ggml_threadpool_t     pool; /* NULL: ggml-cpu's own threads */
    struct ggml_context * cache_ctx;
    ggml_backend_buffer_t cache_buffer;
    struct ggml_tensor *  k[N_LAYER], * v[N_LAYER];
} context;

typedef struct inputs {
    struct ggml_tensor * states, * positions, * cells, * mask;
} inputs;

static struct ggml_tensor * normed(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * weight) {
    return ggml_mul(ctx, ggml_rms_norm(ctx, x, 1e-6f), weight);
}

static struct ggml_tensor * roped(
    struct ggml_context * ctx, struct ggml_tensor * weight, struct ggml_tensor * x, int n_head, const inputs * in) {
    struct ggml_tensor * heads = ggml_reshape_3d(ctx, ggml_mul_mat(ctx, weight, x), HEAD, n_head, x->ne[1]);
    return ggml_rope(ctx, heads, in->positions, HEAD, 0);
}

static struct ggml_tensor * cached(struct ggml_context * ctx, struct ggml_tensor * cache) {
    struct ggml_tensor * heads = ggml_view_3d(
        ctx, cache, HEAD, N_HEAD_KV, N_CTX, ggml_row_size(cache->type, HEAD), cache->nb[1], 0);
    return ggml_permute(ctx, heads, 0, 2, 1, 3);
}

static struct ggml_tensor * attend(
    const context * c, struct ggml_context * ctx, struct ggml_cgraph * graph, int layer, struct ggml_tensor * x,
    const inputs * in) {
    struct ggml_tensor * const * w     = c->of->tensors[layer];
    const float                  scale = 1.0f / sqrtf(HEAD);
    struct ggml_tensor *         q     = ggml_permute(ctx, roped(ctx, w[Q], x, N_HEAD, in), 0, 2, 1, 3);
    struct ggml_tensor * k = ggml_reshape_2d(ctx, roped(ctx, w[K], x, N_HEAD_KV, in), D_KV, x->ne[1]);
    ggml_build_forward_expand(graph, ggml_set_rows(ctx, c->k[layer], k, in->cells));
    ggml_build_forward_expand(graph, ggml_set_rows(ctx, c->v[layer], ggml_mul_mat(ctx, w[V], x), in->cells));
    struct ggml_tensor * keys = cached(ctx, c->k[layer]), * values = cached(ctx, c->v[layer]), * out;
    if (c->is_flash) {
        out = ggml_flash_attn_ext(ctx, q, keys, values, in->mask, scale, 0.0f, 0.0f);
    } else {
        struct ggml_tensor * p = ggml_soft_max_ext(ctx, ggml_mul_mat(ctx, keys, q), in->mask, scale, 0.0f);
        ggml_format_name(p, "kq_soft_max-%d", layer);
        out = ggml_mul_mat(ctx, ggml_cont(ctx, ggml_transpose(ctx, values)), p);
        out = ggml_cont(ctx, ggml_permute(ctx, out, 0, 2, 1, 3));
    }
    return ggml_mul_mat(ctx, w[OUT], ggml_reshape_2d(ctx, out, D, x->ne[1]));
}

static struct ggml_tensor * feed_forward(
    const context * c, struct ggml_context * ctx, int layer, struct ggml_tensor * x) {
    struct ggml_tensor * const * w    = c->of->tensors[layer];
    struct ggml_tensor *         gate = ggml_mul_mat(ctx, w[GATE], x);
    return ggml_mul_mat(ctx, w[DOWN], ggml_swiglu_split(ctx, gate, ggml_mul_mat(ctx, w[UP], x)));
}

static struct ggml_tensor * input(struct ggml_context * ctx, enum ggml_type type, int64_t n0, int64_t n1) {
    struct ggml_tensor * tensor = ggml_new_tensor_2d(ctx, type, n0, n1);
    ggml_set_input(tensor);
    return tensor;
}

static struct ggml_tensor * build(
    const context * c, struct ggml_context * ctx, struct ggml_cgraph * graph, int n_tokens, inputs * in) {
    *in = (inputs){input(ctx, GGML_TYPE_F32, D, n_tokens), input(ctx, GGML_TYPE_I32, n_tokens, 1),
                   input(ctx, GGML_TYPE_I64, n_tokens, 1), input(ctx, GGML_TYPE_F16, N_CTX, n_tokens)};
    struct ggml_tensor * x = in->states;
    for (int layer = 0; layer < N_LAYER; ++layer) {
        struct ggml_tensor * const * w = c->of->tensors[layer];
        x = ggml_add(ctx, x, attend(c, ctx, graph, layer, normed(ctx, x, w[ATTN_NORM]), in));
        x = ggml_add(ctx, x, feed_forward(c, ctx, layer, normed(ctx, x, w[FFN_NORM])));
    }
    x = ggml_mul_mat(ctx, c->of->output, normed(ctx, x, c->of->norm));
    ggml_set_output(x);
    ggml_build_forward_expand(graph, x);
    return x;
}

static void set_inputs(const inputs * in, int n_past, int n_tokens) {
    ggml_fp16_t mask[N_CTX];
    float       state[D];
    for (int i = 0; i < n_tokens; ++i) {
        const int32_t position = n_past + i;
        const int64_t cell     = position;
        for (int j = 0; j < N_CTX; ++j) {
            mask[j] = ggml_fp32_to_fp16(j <= position ? 0.0f : -INFINITY);
        }
        for (int j = 0; j < D; ++j) {
            state[j] = sinf((float) (position * D + j));
        }
        ggml_backend_tensor_set(in->positions, &position, (size_t) i * sizeof position, sizeof position);
        ggml_backend_tensor_set(in->cells, &cell, (size_t) i * sizeof cell, sizeof cell);
        ggml_backend_tensor_set(in->mask, mask, (size_t) i * sizeof mask, sizeof mask);
        ggml_backend_tensor_set(in->states, state, (size_t) i * sizeof state, sizeof state);
    }
}

/* As llama.cpp does before each graph: to its own CPU backend, through the registry. */
static void set_threadpool(const context * c) {
    void (*set)(ggml_backend_t, ggml_threadpool_t);
    *(void **) &set = ggml_backend_reg_get_proc_address(ggml_backend_cpu_reg(), "ggml_backend_cpu_set_threadpool");
    set(c->backends[1], c->pool);
}

/* Evaluate tokens at n_past..; the last one's results go to `results`. NULL: nothing is computed. */
static void evaluate(context * c, int n_past, int n_tokens, float * results) {
    inputs                in;
    struct ggml_context * ctx   = new_context(N_GRAPH);
    struct ggml_cgraph *  graph = ggml_new_graph_custom(ctx, N_GRAPH, false);
    struct ggml_tensor *  out   = build(c, ctx, graph, n_tokens, &in);
    ggml_backend_sched_reset(c->sched);
    if (!results) {
        CHECK(ggml_backend_sched_reserve(c->sched, graph));
    } else {
        CHECK(ggml_backend_sched_alloc_graph(c->sched, graph));
        set_inputs(&in, n_past, n_tokens);
        set_threadpool(c);
        CHECK(ggml_backend_sched_graph_compute(c->sched, graph) == GGML_STATUS_SUCCESS);
        ggml_backend_tensor_get(out, results, (size_t) (n_tokens - 1) * out->nb[1], N_OUT * sizeof *results);
    }
    ggml_free(ctx);
}

static void add_cache(context * c) {
    c->cache_ctx = new_context(2 * N_LAYER);
    for (int layer = 0; layer < N_LAYER; ++layer) {
        c->k[layer] = ggml_new_tensor_2d(c->cache_ctx, GGML_TYPE_F16, D_KV, N_CTX);
        c->v[layer] = ggml_new_tensor_2d(c->cache_ctx, GGML_TYPE_F16, D_KV, N_CTX);
        ggml_format_name(c->k[layer], "cache_k_l%d", layer);
        ggml_format_name(c->v[layer], "cache_v_l%d", layer);
    }
    c->cache_buffer = ggml_backend_alloc_ctx_tensors_from_buft(c->cache_ctx, ggml_backend_cpu_buffer_type());
    CHECK(c->cache_buffer);
    ggml_backend_buffer_clear(c->cache_buffer, 0);
}

/* Open a context on `first`, and let ggml see its graph. */
static void open_on(context * c, const model * m, ggml_backend_t first, uint64_t variant) {
    *c             = (context){.of = m, .is_flash = variant & 1, .backends = {first, ggml_backend_cpu_init()}};
    if (variant & 2) {
        struct ggml_threadpool_params params = ggml_threadpool_params_default(2);
        c->pool                              = ggml_threadpool_new(&params);
    }
    for (int i = 0; i < 2; ++i) {
        CHECK(c->backends[i]);
        ggml_backend_cpu_set_n_threads(c->backends[i], 2);
    }
    add_cache(c);
    c->sched = ggml_backend_sched_new(c->backends, NULL, 2, N_GRAPH, false, false);
    CHECK(c->sched);
    evaluate(c, 0, 16, NULL);
}

static llmaas_engine * create(context * c, const model * m, uint64_t variant) {
    llmaas_create_begin(m->weights);
    const ggml_backend_dev_t device = ggml_backend_dev_by_name("LLMAAS");
    CHECK(device);
    open_on(c, m, ggml_backend_dev_init(device, NULL), variant);
    llmaas_engine * engine = llmaas_create_end();
    CHECK(engine && (ggml_backend_t) engine == c->backends[0]);
    CHECK(!llmaas_weights_problem(m->weights, true));
    return engine;
}

static void close_context(context * c) {
    ggml_backend_sched_free(c->sched);
    ggml_backend_free(c->backends[0]);
    ggml_backend_free(c->backends[1]);
    ggml_threadpool_free(c->pool);
    ggml_backend_buffer_free(c->cache_buffer);
    ggml_free(c->cache_ctx);
}

/* A prompt, then some tokens one by one. */
static void generate(context * c, float * results) {
    evaluate(c, 0, 16, results);
    evaluate(c, 16, 5, results);
    for (int i = 21; i < 25; ++i) {
        evaluate(c, i, 1, results);
    }
}

/* -- threads ------------------------------------------------------------------------------------------------------- */

static model       models[N_MODELS];
static int         n_rounds;
static atomic_int  n_working = N_WORKERS;

/* What a worker shows the others: its engine is there while they hold the lock. */
static struct shown {
    pthread_mutex_t  lock;
    llmaas_engine *  engine;
    llmaas_density * density;
    llmaas_states *  states;
} shown[N_WORKERS];

static void show(struct shown * s, llmaas_engine * engine) {
    pthread_mutex_lock(&s->lock);
    s->engine = engine;
    pthread_mutex_unlock(&s->lock);
}

/* A context from its creation to its end. */
static void work_once(struct shown * s, uint64_t variant) {
    context         c;
    float           first[N_OUT], again[N_OUT];
    llmaas_engine * engine = create(&c, &models[variant / 4 % N_MODELS], variant);
    generate(&c, first); /* at level 0: all of every weight */
    show(s, engine);
    for (int i = 0; i < 3; ++i) {
        generate(&c, again); /* at whatever level */
    }
    pthread_mutex_lock(&s->lock); /* nobody switches now, nor from here on */
    llmaas_engine_set_level(engine, -1);
    generate(&c, again);
    CHECK(memcmp(first, again, sizeof first) == 0);
    close_context(&c); /* and the subscriptions with it */
    llmaas_density_free(s->density);
    llmaas_states_free(s->states);
    s->engine  = NULL;
    s->density = NULL;
    s->states  = NULL;
    pthread_mutex_unlock(&s->lock);
}

static void * work(void * arg) {
    const int worker = *(const int *) arg;
    for (int i = 0; i < n_rounds; ++i) {
        work_once(&shown[worker], (uint64_t) (i * N_WORKERS + worker));
    }
    n_working--;
    return NULL;
}

static void listen_or_stop(struct shown * s) {
    if (!s->density) {
        s->density           = llmaas_density_new(N_CTX, N_LAYER, 1, 1);
        s->states            = llmaas_states_new(LLMAAS_TAP_FFN_INPUT, 1, D, 8);
        const llmaas_tap a = llmaas_density_tap(s->density), b = llmaas_states_tap(s->states);
        CHECK(llmaas_engine_subscribe(s->engine, &a) == LLMAAS_OK);
        CHECK(llmaas_engine_subscribe(s->engine, &b) == LLMAAS_OK);
    } else {
        CHECK(llmaas_engine_unsubscribe(s->engine, s->density) == LLMAAS_OK);
        CHECK(llmaas_engine_unsubscribe(s->engine, s->states) == LLMAAS_OK);
        llmaas_density_free(s->density);
        llmaas_states_free(s->states);
        s->density = NULL;
        s->states  = NULL;
    }
}

static void read_all(struct shown * s) {
    double              sums[N_CTX];
    uint64_t            counts[N_CTX], n_lost;
    float               rows[8 * D];
    uint32_t            n_taken;
    llmaas_engine_stats stats;
    llmaas_engine_read_stats(s->engine, &stats);
    CHECK(stats.n_passed <= stats.n_graphs);
    if (s->density) {
        CHECK(llmaas_density_read(s->density, N_CTX, sums, counts) == LLMAAS_OK);
        CHECK(llmaas_states_take(s->states, 8, rows, &n_taken, &n_lost) == LLMAAS_OK);
    }
}

static void * meddle(void * arg) {
    for (uint32_t i = 0; n_working > 0; ++i) {
        struct shown * s = &shown[i % N_WORKERS];
        pthread_mutex_lock(&s->lock);
        if (s->engine) {
            llmaas_engine_set_level(s->engine, (int32_t) (i / 3 % 5) - 1);
            read_all(s);
            if (i % 5 < 2) {
                listen_or_stop(s);
            }
        }
        pthread_mutex_unlock(&s->lock);
        CHECK(llmaas_engine_count() <= N_WORKERS);
        usleep(500);
    }
    (void) arg;
    return NULL;
}

static void * load_others(void * arg) {
    for (int i = 0; n_working > 0; ++i) {
        model m;
        load(&m, (model_kind) (i % 3));
        unload(&m);
        usleep(2000);
    }
    (void) arg;
    return NULL;
}

/* What an app that has no engine does, all the time. */
static void * stay_vanilla(void * arg) {
    context c;
    float   first[N_OUT], again[N_OUT];
    open_on(&c, &models[REPACKED], ggml_backend_cpu_init(), 1);
    generate(&c, first);
    while (n_working > 0) {
        generate(&c, again);
        CHECK(memcmp(first, again, sizeof first) == 0);
    }
    close_context(&c);
    (void) arg;
    return NULL;
}

static void no_log(enum ggml_log_level level, const char * text, void * user) {
    (void) level, (void) text, (void) user;
}

int main(int argc, char ** argv) {
    void * (*const others[])(void *) = {meddle, load_others, stay_vanilla};
    pthread_t threads[N_WORKERS + 3];
    int       workers[N_WORKERS];
    n_rounds = argc > 1 ? atoi(argv[1]) : 1;
    ggml_log_set(no_log, NULL);
    CHECK(!llmaas_ggml_refusal());
    for (int i = 0; i < N_MODELS; ++i) {
        load(&models[i], (model_kind) i);
    }
    for (int i = 0; i < N_WORKERS; ++i) {
        workers[i] = i;
        CHECK(pthread_mutex_init(&shown[i].lock, NULL) == 0);
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (int i = 0; i < 3; ++i) {
        CHECK(pthread_create(&threads[N_WORKERS + i], NULL, others[i], NULL) == 0);
    }
    for (int i = 0; i < N_WORKERS + 3; ++i) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK(llmaas_engine_count() == 0 && !llmaas_backend_registered());
    for (int i = 0; i < N_MODELS; ++i) {
        unload(&models[i]);
    }
    return 0;
}
