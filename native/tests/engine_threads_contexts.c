/* Contexts without llama.cpp: graphs like those it builds, evaluated with the calls it makes. */
#include "engine_threads.h"

#include "ggml-alloc.h"
#include "ggml-cpu.h"

#include <math.h>

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

/* Set the thread pool of the CPU backend through the registry, as llama.cpp does before each graph. */
static void set_threadpool(const context * c) {
    void (*set)(ggml_backend_t, ggml_threadpool_t);
    *(void **) &set = ggml_backend_reg_get_proc_address(ggml_backend_cpu_reg(), "ggml_backend_cpu_set_threadpool");
    set(c->backends[1], c->pool);
}

/* Evaluate tokens at n_past..; store the last token's results in `results`. NULL: compute nothing. */
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

void open_context(context * c, const model * m, ggml_backend_t first, uint64_t variant) {
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

llmaas_engine * create_context(context * c, const model * m, uint64_t variant) {
    llmaas_create_begin(m->weights);
    const ggml_backend_dev_t device = ggml_backend_dev_by_name("LLMAAS");
    CHECK(device);
    open_context(c, m, ggml_backend_dev_init(device, NULL), variant);
    llmaas_engine * engine = llmaas_create_end();
    CHECK(engine && (ggml_backend_t) engine == c->backends[0]);
    CHECK(!llmaas_weights_problem(m->weights, true));
    return engine;
}

void close_context(context * c) {
    ggml_backend_sched_free(c->sched);
    ggml_backend_free(c->backends[0]);
    ggml_backend_free(c->backends[1]);
    ggml_threadpool_free(c->pool);
    ggml_backend_buffer_free(c->cache_buffer);
    ggml_free(c->cache_ctx);
}

void generate(context * c, float * results) {
    evaluate(c, 0, 16, results);
    evaluate(c, 16, 5, results);
    for (int i = 21; i < 25; ++i) {
        evaluate(c, i, 1, results);
    }
}
