/* Biases reach whoever reads a product: by an addition's step, through rows that are looked up, or by a step of their
 * own. */
#include "check.h"

#include "weights/biases.h"

enum { N = 32, N_ROWS = 5 };

static float biases[N], more[N];

static struct ggml_tensor * random_rows(struct ggml_context * ctx, int64_t n_rows) {
    struct ggml_tensor * rows = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, N, n_rows);
    for (int64_t i = 0; i < ggml_nelements(rows); ++i) {
        ((float *) rows->data)[i] = (float) rnd_below(2001) / 1000.0f - 1.0f;
    }
    return rows;
}

static void compute(struct ggml_cgraph * graph, int n_threads) {
    struct ggml_cplan plan = ggml_graph_plan(graph, n_threads, NULL);
    plan.work_data         = exact(plan.work_size);
    CHECK(ggml_graph_compute(graph, &plan) == GGML_STATUS_SUCCESS);
    free(plan.work_data);
}

static struct ggml_cgraph * graph_of(struct ggml_context * ctx, struct ggml_tensor * result) {
    struct ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, result);
    return graph;
}

/* A function that builds nodes that read two products a and b. Their result must be the same with deferred biases as
 * with biases added by nodes. */
typedef struct ggml_tensor * (*reader)(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b);

static struct ggml_tensor * given(struct ggml_context * ctx, struct ggml_tensor * product, const float * values) {
    struct ggml_tensor * row = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, N);
    memcpy(row->data, values, sizeof biases);
    return ggml_add(ctx, product, row);
}

/* Rewrite a graph as an engine does. Return how many nodes result. */
static int rewrite(llmaas_graph * graph, struct ggml_cgraph * original, struct ggml_tensor * a, struct ggml_tensor * b) {
    llmaas_biases all = {0};
    llmaas_graph_begin(graph, original);
    for (int i = 0; i < original->n_nodes; ++i) {
        struct ggml_tensor * node = original->nodes[i];
        if (!llmaas_biases_fuse(&all, graph, original, node)) {
            llmaas_graph_append(graph, node);
        }
        if (node == a || node == b) {
            llmaas_biases_defer(&all, graph, original, node, node == a ? biases : more);
        }
    }
    llmaas_biases_flush(&all, graph);
    CHECK(all.n_deferred == 0);
    return llmaas_graph_end(graph)->n_nodes;
}

/* Check a reader. n_steps: steps added to the original nodes or replacing them. */
static void check_reader(reader read, int n_steps) {
    struct ggml_context * ctx   = ggml_init((struct ggml_init_params){.mem_size = 1u << 20});
    llmaas_graph *        graph = llmaas_graph_new();
    struct ggml_tensor *  x     = random_rows(ctx, N_ROWS);
    struct ggml_tensor *  y     = random_rows(ctx, N_ROWS);
    struct ggml_tensor *  a = ggml_scale(ctx, x, 2.0f), * b = ggml_scale(ctx, y, 3.0f);
    struct ggml_tensor *  expected =
        read(ctx, given(ctx, ggml_scale(ctx, x, 2.0f), biases), given(ctx, ggml_scale(ctx, y, 3.0f), more));
    compute(graph_of(ctx, expected), 2);
    struct ggml_tensor * found    = read(ctx, a, b);
    struct ggml_cgraph * original = graph_of(ctx, found);
    CHECK(rewrite(graph, original, a, b) == original->n_nodes + n_steps);
    compute(llmaas_graph_end(graph), 2);
    CHECK(memcmp(found->data, expected->data, ggml_nbytes(found)) == 0);
    llmaas_graph_free(graph);
    ggml_free(ctx);
}

static struct ggml_tensor * sum(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b) {
    return ggml_add(ctx, a, b);
}

static struct ggml_tensor * norm(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b) {
    return ggml_add(ctx, ggml_rms_norm(ctx, a, 1e-6f), b);
}

static struct ggml_tensor * of_rows(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b) {
    struct ggml_tensor * ids = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 2);
    memcpy(ids->data, (int32_t[]) {3, 1}, ggml_nbytes(ids));
    return ggml_add(ctx, ggml_get_rows(ctx, a, ids), ggml_get_rows(ctx, b, ids));
}

static struct ggml_tensor * with_a_vector(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b) {
    return ggml_add(ctx, given(ctx, b, biases), ggml_rms_norm(ctx, a, 1e-6f));
}

static struct ggml_tensor * twice(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b) {
    return ggml_add(ctx, ggml_add(ctx, a, b), a);
}

static struct ggml_tensor * first(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b) {
    (void) ctx, (void) b;
    return a;
}

int main(void) {
    for (int i = 0; i < N; ++i) {
        biases[i] = (float) i * 0.01f;
        more[i]   = 1.0f - (float) i * 0.02f;
    }
    const struct {
        reader read;
        int    n_steps;
    } readers[] = {{sum, 1}, {norm, 1}, {of_rows, 1}, {with_a_vector, 1}, {twice, 1}, {first, 1}};
    for (size_t i = 0; i < sizeof readers / sizeof *readers; ++i) {
        check_reader(readers[i].read, readers[i].n_steps);
    }
    return 0;
}
