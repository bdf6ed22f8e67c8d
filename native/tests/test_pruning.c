/* Nodes that depend on left-out rows are left out, too. The result equals that of a graph whose last matrix has zeros
 * in the unused columns. Whatever is not computed is NaN, which shows that nobody reads it. */
#include "check.h"

#include "ggml-backend.h"
#include "weights/pruning.h"

#include <math.h>

enum { D = 32, WIDTH = 64, N_KV = 40, MAX_NODES = 64 };

static const float LAST_BITS = 1e-4f; /* with fewer columns, sums are added in another order */

typedef struct shape {
    int  n_groups, n_shared, n_tokens, n_threads;
    bool is_flash, is_capped, is_normed;
} shape;

static struct ggml_context * ctx;

static struct ggml_tensor * tensor(int64_t n0, int64_t n1, int64_t n2) {
    struct ggml_tensor * made = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n0, n1, n2);
    for (int64_t i = 0; i < ggml_nelements(made); ++i) {
        ((float *) made->data)[i] = (float) rnd_below(2001) / 1000.0f - 1.0f;
    }
    return made;
}

/* Return a buffer marked as weights; the matrices' memory is still the context's. */
static ggml_backend_buffer_t weights_buffer(void) {
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(ggml_get_mem_buffer(ctx), ggml_get_mem_size(ctx));
    CHECK(buffer);
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    return buffer;
}

static struct ggml_tensor * matrix(ggml_backend_buffer_t buffer, const char * name, int64_t n0, int64_t n1, int64_t n2) {
    struct ggml_tensor * made = tensor(n0, n1, n2);
    made->buffer              = buffer;
    return ggml_set_name(made, name);
}

static struct ggml_tensor * with_zeros(const struct ggml_tensor * of, int64_t n_columns) {
    struct ggml_tensor * copy = ggml_dup_tensor(ctx, of);
    memcpy(copy->data, of->data, ggml_nbytes(of));
    for (int64_t i = 0; i < ggml_nelements(copy); ++i) {
        ((float *) copy->data)[i] *= i % of->ne[0] < n_columns ? 1.0f : 0.0f;
    }
    return copy;
}

static void compute(struct ggml_cgraph * graph, int n_threads) {
    struct ggml_cplan plan = ggml_graph_plan(graph, n_threads, NULL);
    plan.work_data         = exact(plan.work_size);
    CHECK(ggml_graph_compute(graph, &plan) == GGML_STATUS_SUCCESS);
    free(plan.work_data);
}

static struct ggml_cgraph * graph_of(struct ggml_tensor * result) {
    struct ggml_cgraph * graph = ggml_new_graph_custom(ctx, MAX_NODES, false);
    ggml_build_forward_expand(graph, result);
    return graph;
}

/* Rewrite a graph as an engine does. */
static void rewrite(
    const llmaas_pruning * pruning, const llmaas_weights * weights, llmaas_graph * graph, struct ggml_cgraph * original) {
    llmaas_graph_begin(graph, original);
    for (int i = 0; i < original->n_nodes; ++i) {
        struct ggml_tensor *  node   = original->nodes[i];
        llmaas_pruned *       pruned = llmaas_pruning_of(pruning, node);
        const llmaas_pruned * read   = llmaas_pruning_of(pruning, node->src[1]);
        const llmaas_weight * weight = llmaas_weights_find(weights, node->src[0]);
        if (pruned && pruned->n == 0) {
            continue;
        }
        struct ggml_tensor * used = pruned ? llmaas_pruned_make(pruning, graph, pruned) : node;
        if (!pruned && read && read->narrowed) {
            used         = llmaas_graph_copy(graph, node);
            used->src[1] = read->narrowed;
        }
        if (llmaas_op_of(node) == LLMAAS_OP_SET_ROWS) {
            llmaas_pruning_clear_rest(pruning, graph, node->src[0]);
        }
        if (!weight || !llmaas_weight_multiply(weight, 0, graph, used)) {
            llmaas_graph_append(graph, used);
        }
    }
}

typedef struct claim {
    struct ggml_tensor * weight;
    llmaas_axis          axis;
    int64_t              n;
} claim;

static llmaas_weights * claimed(struct ggml_cgraph * graph, const claim * claims, int n_claims) {
    llmaas_weights * weights = llmaas_weights_new();
    for (int i = 0; i < n_claims; ++i) {
        const char * name = claims[i].weight->name;
        CHECK(llmaas_weights_claim_part(weights, name, claims[i].axis, &claims[i].n, 1) == LLMAAS_OK);
    }
    llmaas_weights_note(weights, graph);
    CHECK(!llmaas_weights_problem(weights, true));
    return weights;
}

/* Compute `found` with parts of weights, from memory that holds NaN. Return how many nodes are pruned. */
static int compute_parts(struct ggml_tensor * found, const claim * claims, int n_claims, int n_threads) {
    llmaas_pruning      pruning = {0};
    struct ggml_cgraph * original = graph_of(found);
    llmaas_weights *     weights  = claimed(original, claims, n_claims);
    llmaas_graph *       graph    = llmaas_graph_new();
    int                  n_cut    = 0;
    for (int i = 0; i < original->n_nodes; ++i) {
        memset(original->nodes[i]->data, 0xff, ggml_nbytes(original->nodes[i]));
    }
    for (int round = 0; round < 2; ++round) { /* graphs are reused */
        CHECK(llmaas_pruning_find(&pruning, weights, 0, original));
        rewrite(&pruning, weights, graph, original);
        compute(llmaas_graph_end(graph), n_threads);
    }
    for (int i = 0; i < original->n_nodes; ++i) {
        n_cut += llmaas_pruning_of(&pruning, original->nodes[i]) != NULL;
    }
    llmaas_graph_free(graph);
    llmaas_pruning_free(&pruning);
    llmaas_weights_release(weights);
    return n_cut;
}

static float difference(const struct ggml_tensor * a, const struct ggml_tensor * b) {
    float most = 0.0f;
    for (int64_t i = 0; i < ggml_nelements(a); ++i) {
        const float d = fabsf(((const float *) a->data)[i] - ((const float *) b->data)[i]);
        CHECK(isfinite(d));
        most = d > most ? d : most;
    }
    return most;
}

/* -- attention ----------------------------------------------------------------------------------------------------- */

typedef struct layer {
    shape                of;
    struct ggml_tensor * x, * queries, * bias, * norm, * positions, * keys, * values, * mask, * output;
} layer;

static struct ggml_tensor * cache(const shape * of) { return ggml_cast(ctx, tensor(D, of->n_groups, N_KV), GGML_TYPE_F16); }

static layer new_layer(shape of, ggml_backend_buffer_t buffer) {
    const int n_heads = of.n_groups * of.n_shared;
    layer     made    = {of, tensor(WIDTH, of.n_tokens, 1), matrix(buffer, "blk.0.attn_q.weight", WIDTH, n_heads * D, 1),
                         tensor(n_heads * D, 1, 1), tensor(D, 1, 1), ggml_new_tensor_1d(ctx, GGML_TYPE_I32, of.n_tokens),
                         cache(&of), cache(&of), NULL, matrix(buffer, "blk.0.attn_output.weight", n_heads * D, WIDTH, 1)};
    for (int i = 0; i < of.n_tokens; ++i) {
        ((int32_t *) made.positions->data)[i] = 100 + i;
    }
    made.mask = ggml_cast(ctx, tensor(N_KV, of.n_tokens, 1), GGML_TYPE_F16);
    return made;
}

static struct ggml_tensor * capped(struct ggml_tensor * scores) {
    return ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, scores, 0.1f)), 10.0f);
}

static struct ggml_tensor * queries_of(const layer * l) {
    struct ggml_tensor * q = ggml_add(ctx, ggml_mul_mat(ctx, l->queries, l->x), l->bias);
    q = ggml_reshape_3d(ctx, q, D, l->of.n_groups * l->of.n_shared, l->of.n_tokens);
    if (l->of.is_normed) {
        q = ggml_mul(ctx, ggml_rms_norm(ctx, q, 1e-6f), l->norm);
    }
    q = ggml_scale(ctx, ggml_rope(ctx, q, l->positions, D, 0), 0.2f);
    return ggml_permute(ctx, ggml_view_4d(ctx, q, D, q->ne[1], q->ne[2], 1, q->nb[1], q->nb[2], q->nb[3], 0), 0, 2, 1, 3);
}

static struct ggml_tensor * attention_of(const layer * l, struct ggml_tensor * q) {
    struct ggml_tensor * k = ggml_permute(ctx, l->keys, 0, 2, 1, 3), * v = ggml_permute(ctx, l->values, 0, 2, 1, 3), * out;
    const int64_t        n = q->ne[0] * q->ne[2];
    if (l->of.is_flash) {
        out = ggml_flash_attn_ext(ctx, q, k, v, l->mask, 1.0f, 0.0f, l->of.is_capped ? 10.0f : 0.0f);
        return ggml_reshape_2d(ctx, out, n, l->of.n_tokens);
    }
    struct ggml_tensor * scores = ggml_mul_mat(ctx, k, q);
    struct ggml_tensor * p      = ggml_soft_max_ext(ctx, l->of.is_capped ? capped(scores) : scores, l->mask, 1.0f, 0.0f);
    out = ggml_mul_mat(ctx, ggml_cont(ctx, ggml_transpose(ctx, v)), p);
    return ggml_cont_2d(ctx, ggml_permute(ctx, out, 0, 2, 1, 3), n, l->of.n_tokens);
}

/* Return the nodes expected to be cut: product, bias, shape, [norm, weight,] rotation, scale, view, order; then
 * attention. */
static int n_expected(const shape * of) {
    return 7 + 2 * of->is_normed + (of->is_flash ? 2 : 5 + 3 * of->is_capped);
}

static void check_attention(shape of, int n_heads, bool is_cut) {
    ctx                          = ggml_init((struct ggml_init_params){.mem_size = 16u << 20});
    ggml_backend_buffer_t buffer = weights_buffer();
    const layer           l      = new_layer(of, buffer);
    const int64_t         n      = (int64_t) n_heads * D;
    struct ggml_tensor *  found  = ggml_mul_mat(ctx, l.output, attention_of(&l, queries_of(&l)));
    struct ggml_tensor *  other  = ggml_mul_mat(ctx, with_zeros(l.output, n), attention_of(&l, queries_of(&l)));
    const claim claims[] = {{l.queries, LLMAAS_ROWS, n}, {l.output, LLMAAS_COLUMNS, n}};
    compute(graph_of(other), of.n_threads);
    const int n_cut = compute_parts(found, claims, 2, of.n_threads);
    CHECK(n_cut == (is_cut ? n_expected(&of) : 0));
    CHECK(difference(found, other) <= LAST_BITS);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
}

static void test_heads(void) {
    for (int round = 0; round < 60; ++round) {
        const shape of = {2 + (int) rnd_below(3), 1 + (int) rnd_below(3), round % 3 ? 1 + (int) rnd_below(20) : 1,
                          1 + (int) rnd_below(3), round & 1, round & 2, round & 4};
        const int n_heads = (int) rnd_below((uint32_t) of.n_groups) * of.n_shared;
        check_attention(of, n_heads, true);
        if (of.n_shared > 1) {
            check_attention(of, n_heads + 1, false); /* not whole groups */
            shape one    = of;
            one.n_groups = 1;
            check_attention(one, 1, true); /* all share one */
        }
    }
}

/* -- keys and values ----------------------------------------------------------------------------------------------- */

enum { N_HEADS = 4 };

/* Return the rows of heads, as they are or one value a row, as llama.cpp stores values without flash attention. */
static struct ggml_tensor * stored(struct ggml_tensor * heads, bool is_transposed) {
    const int64_t n = heads->ne[0] * heads->ne[1];
    struct ggml_tensor * rows = ggml_reshape_2d(ctx, heads, n, heads->ne[2]);
    return is_transposed ? ggml_reshape_2d(ctx, rows, 1, n * heads->ne[2]) : rows;
}

/* Check that heads left out reach a cache as zeros, though a bias is added to them. */
static void check_cache(int64_t n_tokens, int64_t n_heads, bool is_transposed) {
    ctx                             = ggml_init((struct ggml_init_params){.mem_size = 4u << 20});
    ggml_backend_buffer_t buffer    = weights_buffer();
    struct ggml_tensor *  keys      = matrix(buffer, "blk.0.attn_k.weight", WIDTH, N_HEADS * D, 1);
    struct ggml_tensor *  k         = ggml_mul_mat(ctx, keys, tensor(WIDTH, n_tokens, 1));
    struct ggml_tensor *  positions = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_tokens);
    k = ggml_reshape_3d(ctx, ggml_add(ctx, k, tensor(N_HEADS * D, 1, 1)), D, N_HEADS, n_tokens);
    for (int i = 0; i < n_tokens; ++i) {
        ((int32_t *) positions->data)[i] = 100 + i;
    }
    struct ggml_tensor * rows  = stored(ggml_rope(ctx, k, positions, D, 0), is_transposed);
    struct ggml_tensor * cache = tensor(rows->ne[0], rows->ne[1] + 1, 1);
    struct ggml_tensor * cells = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, rows->ne[1]);
    for (int64_t i = 0; i < rows->ne[1]; ++i) {
        ((int64_t *) cells->data)[i] = i;
    }
    const claim claims[] = {{keys, LLMAAS_ROWS, n_heads * D}};
    CHECK(compute_parts(ggml_set_rows(ctx, cache, rows, cells), claims, 1, 2) == 0);
    for (int64_t i = 0; i < n_tokens * N_HEADS * D; ++i) {
        const bool is_left_out = i % (N_HEADS * D) >= n_heads * D;
        CHECK((((const float *) cache->data)[i] == 0.0f) == is_left_out);
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
}

static void test_caches(void) {
    for (int64_t n_heads = 0; n_heads <= N_HEADS; ++n_heads) {
        check_cache(1, n_heads, false);
        check_cache(7, n_heads, false);
        check_cache(7, n_heads, true);
    }
}

/* -- neurons ------------------------------------------------------------------------------------------------------- */

typedef struct ggml_tensor * (*middle)(struct ggml_tensor * gate, struct ggml_tensor * up);

static struct ggml_tensor * swiglu(struct ggml_tensor * gate, struct ggml_tensor * up) { return ggml_swiglu_split(ctx, gate, up); }
static struct ggml_tensor * geglu(struct ggml_tensor * gate, struct ggml_tensor * up) { return ggml_geglu_split(ctx, gate, up); }
static struct ggml_tensor * product(struct ggml_tensor * gate, struct ggml_tensor * up) {
    return ggml_mul(ctx, ggml_relu(ctx, gate), up);
}
static struct ggml_tensor * halves(struct ggml_tensor * gate, struct ggml_tensor * up) { /* no rule knows it */
    return ggml_swiglu(ctx, ggml_concat(ctx, gate, up, 0));
}
static struct ggml_tensor * both(struct ggml_tensor * gate, struct ggml_tensor * up) {
    return ggml_mul(ctx, ggml_silu(ctx, gate), ggml_add(ctx, gate, up));
}
static struct ggml_tensor * shown(struct ggml_tensor * gate, struct ggml_tensor * up) { /* an app reads it */
    struct ggml_tensor * out = ggml_swiglu_split(ctx, gate, up);
    ggml_set_output(out);
    return out;
}

enum { N_FF = 96 };

/* Return how many nodes are cut if gate, up and down have n_gate, n_up and n_down of their neurons; -1: all. */
static int check_neurons(middle between, int n_tokens, int64_t n_gate, int64_t n_up, int64_t n_down) {
    ctx                          = ggml_init((struct ggml_init_params){.mem_size = 4u << 20});
    ggml_backend_buffer_t buffer = weights_buffer();
    struct ggml_tensor *  x      = tensor(WIDTH, n_tokens, 1);
    struct ggml_tensor *  gate   = matrix(buffer, "blk.0.ffn_gate.weight", WIDTH, N_FF, 1);
    struct ggml_tensor *  up     = matrix(buffer, "blk.0.ffn_up.weight", WIDTH, N_FF, 1);
    struct ggml_tensor *  down   = matrix(buffer, "blk.0.ffn_down.weight", N_FF, WIDTH, 1);
    struct ggml_tensor *  found =
        ggml_mul_mat(ctx, down, between(ggml_mul_mat(ctx, gate, x), ggml_mul_mat(ctx, up, x)));
    const claim claims[] = {{gate, LLMAAS_ROWS, n_gate}, {up, LLMAAS_ROWS, n_up}, {down, LLMAAS_COLUMNS, n_down}};
    const int   n_cut    = compute_parts(found, claims, 3, 2);
    /* left-out rows are zero, and so is everything computed from them */
    struct ggml_tensor * zeroed = with_zeros(down, n_down < 0 ? N_FF : n_down);
    for (int64_t i = 0; i < WIDTH * N_FF; ++i) {
        ((float *) gate->data)[i] *= n_gate < 0 || i / WIDTH < n_gate ? 1.0f : 0.0f;
        ((float *) up->data)[i] *= n_up < 0 || i / WIDTH < n_up ? 1.0f : 0.0f;
    }
    struct ggml_tensor * other =
        ggml_mul_mat(ctx, zeroed, between(ggml_mul_mat(ctx, gate, x), ggml_mul_mat(ctx, up, x)));
    compute(graph_of(other), 2);
    CHECK(difference(found, other) <= LAST_BITS);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return n_cut;
}

static void test_neurons(void) {
    for (int n_tokens = 1; n_tokens <= 9; n_tokens += 4) {
        CHECK(check_neurons(swiglu, n_tokens, 32, 32, 32) == 3);
        CHECK(check_neurons(geglu, n_tokens, 33, 33, 7) == 3);
        CHECK(check_neurons(product, n_tokens, 32, 32, 32) == 4);
        CHECK(check_neurons(both, n_tokens, 32, 32, 32) == 5);
        CHECK(check_neurons(swiglu, n_tokens, 32, -1, 32) == 2); /* one of two operands is whole */
        CHECK(check_neurons(swiglu, n_tokens, -1, 32, 32) == 2);
        CHECK(check_neurons(swiglu, n_tokens, 0, 0, 0) == 3);
        CHECK(check_neurons(swiglu, n_tokens, 32, 32, 0) == 3);
    }
}

static void test_what_needs_more(void) {
    CHECK(check_neurons(swiglu, 5, 32, 32, 33) == 0); /* columns without a neuron */
    CHECK(check_neurons(swiglu, 5, 32, 32, -1) == 0);
    CHECK(check_neurons(swiglu, 5, 32, 48, 32) == 0); /* two operands, pruned differently */
    CHECK(check_neurons(swiglu, 5, 0, 32, 0) == 0);
    CHECK(check_neurons(halves, 5, 32, 32, 32) == 0);
    CHECK(check_neurons(shown, 5, 32, 32, 32) == 0);
    CHECK(check_neurons(swiglu, 5, -1, -1, 32) == 0);
}

/* Check a graph that comes in pieces because of an app's callback: whatever a later piece reads must be computed in
 * full. */
static void test_pieces(void) {
    ctx                          = ggml_init((struct ggml_init_params){.mem_size = 4u << 20});
    ggml_backend_buffer_t buffer = weights_buffer();
    struct ggml_tensor *  gate   = matrix(buffer, "blk.0.ffn_gate.weight", WIDTH, N_FF, 1);
    struct ggml_tensor *  down   = matrix(buffer, "blk.0.ffn_down.weight", N_FF, WIDTH, 1);
    struct ggml_tensor *  silu   = ggml_silu(ctx, ggml_mul_mat(ctx, gate, tensor(WIDTH, 3, 1)));
    struct ggml_cgraph *  graph  = graph_of(ggml_scale(ctx, ggml_mul_mat(ctx, down, silu), 2.0f));
    const claim           claims[] = {{gate, LLMAAS_ROWS, 32}, {down, LLMAAS_COLUMNS, 32}};
    llmaas_weights *      weights  = claimed(graph, claims, 2);
    llmaas_pruning       pruning = {0};
    for (int n = 1; n <= graph->n_nodes; ++n) {
        struct ggml_cgraph piece = *graph;
        piece.n_nodes            = n;
        CHECK(llmaas_pruning_find(&pruning, weights, 0, &piece));
        CHECK((llmaas_pruning_of(&pruning, silu) != NULL) == (n >= 3));
        CHECK((llmaas_pruning_of(&pruning, silu->src[0]) != NULL) == (n >= 3));
    }
    llmaas_pruning_forget(&pruning);
    CHECK(!llmaas_pruning_of(&pruning, silu));
    llmaas_pruning_free(&pruning);
    llmaas_weights_release(weights);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
}

int main(void) {
    test_heads();
    test_caches();
    test_neurons();
    test_what_needs_more();
    test_pieces();
    return 0;
}
