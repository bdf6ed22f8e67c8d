/* Rewritten graphs: nodes that ggml-cpu fuses stay fused, scratch memory holds as long as documented, and failures are
 * reported. */
#include "check.h"

#include "base/graph.h"

enum { N = 64, N_ROWS = 5 };

static struct ggml_context * new_context(void) {
    struct ggml_context * ctx = ggml_init((struct ggml_init_params){.mem_size = 1u << 20});
    CHECK(ctx);
    return ctx;
}

static struct ggml_tensor * random_rows(struct ggml_context * ctx, int64_t n_rows) {
    struct ggml_tensor * rows = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, N, n_rows);
    for (int64_t i = 0; i < ggml_nelements(rows); ++i) {
        ((float *) rows->data)[i] = (float) rnd_below(2001) / 1000.0f - 1.0f;
    }
    return rows;
}

static void compute(struct ggml_cgraph * graph) {
    struct ggml_cplan plan = ggml_graph_plan(graph, 2, NULL);
    plan.work_data         = exact(plan.work_size);
    CHECK(ggml_graph_compute(graph, &plan) == GGML_STATUS_SUCCESS);
    free(plan.work_data);
}

/* -- fusion -------------------------------------------------------------------------------------------------------- */

/* A normalized product, as in every llama.cpp graph: ggml-cpu computes norm and product in one step if it may. */
typedef struct normalized {
    struct ggml_context * ctx;
    struct ggml_tensor *  norm;
    struct ggml_tensor *  product;
    struct ggml_cgraph *  graph;
    uint8_t               expected[N * N_ROWS * sizeof(float)];
} normalized;

static void forget_results(normalized * n) {
    memset(n->norm->data, 0xff, ggml_nbytes(n->norm));
    memset(n->product->data, 0xff, ggml_nbytes(n->product));
}

/* Return whether the norm was fused: ggml-cpu does not write to a norm that it fuses. */
static bool was_fused(const normalized * n) { return ((const uint32_t *) n->norm->data)[0] == UINT32_MAX; }

static normalized new_normalized(void) {
    normalized n = {.ctx = new_context()};
    n.norm       = ggml_rms_norm(n.ctx, random_rows(n.ctx, N_ROWS), 1e-6f);
    n.product    = ggml_mul(n.ctx, n.norm, random_rows(n.ctx, 1));
    n.graph      = ggml_new_graph(n.ctx);
    ggml_build_forward_expand(n.graph, n.product);
    forget_results(&n);
    compute(n.graph);
    CHECK(was_fused(&n)); /* otherwise this file tests nothing */
    memcpy(n.expected, n.product->data, sizeof n.expected);
    forget_results(&n);
    return n;
}

static void touch(void * arg, int ith, int nth) {
    CHECK(ith < nth);
    if (ith == 0) {
        ++**(int **) arg;
    }
}

/* Rewrite with a step before, between or after the two nodes. The result is bit-identical, and fused unless the step is
 * between. */
static void check_with_step(int at, bool is_fused) {
    normalized     n       = new_normalized();
    llmaas_graph * graph   = llmaas_graph_new();
    int            n_calls = 0, * counter = &n_calls;
    llmaas_graph_begin(graph, n.graph);
    for (int i = 0; i <= n.graph->n_nodes; ++i) {
        if (i == at) {
            CHECK(llmaas_graph_step(graph, touch, &counter, sizeof counter));
        }
        if (i < n.graph->n_nodes) {
            llmaas_graph_append(graph, n.graph->nodes[i]);
        }
    }
    struct ggml_cgraph * rewritten = llmaas_graph_end(graph);
    CHECK(rewritten && rewritten->n_nodes == n.graph->n_nodes + (at >= 0));
    compute(rewritten);
    CHECK(memcmp(n.product->data, n.expected, sizeof n.expected) == 0);
    CHECK(was_fused(&n) == is_fused);
    CHECK(n_calls == (at >= 0));
    llmaas_graph_free(graph);
    ggml_free(n.ctx);
}

static void test_norms_stay_fused_with_their_products(void) {
    check_with_step(-1, true);
    check_with_step(0, true);
    check_with_step(1, false);
    check_with_step(2, true);
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

typedef struct part {
    uint8_t * memory;
    size_t    size;
    uint8_t   value;
} part;

static void write_part(void * arg, int ith, int nth) {
    const part * p = arg;
    for (size_t i = (size_t) ith; i < p->size; i += (size_t) nth) {
        p->memory[i] = p->value;
    }
}

static void check_part(void * arg, int ith, int nth) {
    const part * p = arg;
    for (size_t i = 0; i < p->size; ++i) {
        CHECK(p->memory[i] == p->value);
    }
    (void) ith, (void) nth;
}

static uint8_t * slot(llmaas_graph * graph, int i, size_t size) {
    uint8_t * memory = llmaas_graph_scratch(graph, i, size);
    CHECK(memory && (uintptr_t) memory % 64 == 0);
    return memory;
}

/* Append users of one slot, each larger than the last, so that the slot moves; another slot stays the same
 * throughout. */
static void append_users(llmaas_graph * graph, int n_users) {
    const part kept = {slot(graph, 1, 100), 100, 0xaa};
    CHECK(llmaas_graph_step(graph, write_part, &kept, sizeof kept));
    for (int i = 0; i < n_users; ++i) {
        const size_t size = (size_t) i * (size_t) i * 50 + 1;
        const part   p    = {slot(graph, 0, size), size, (uint8_t) i};
        CHECK(llmaas_graph_step(graph, write_part, &p, sizeof p));
        CHECK(llmaas_graph_step(graph, check_part, &p, sizeof p));
    }
    CHECK(llmaas_graph_step(graph, check_part, &kept, sizeof kept));
}

static void test_scratch_is_its_user_s_until_the_next_one(void) {
    normalized     n     = new_normalized();
    llmaas_graph * graph = llmaas_graph_new();
    for (int round = 0; round < 3; ++round) {
        llmaas_graph_begin(graph, n.graph);
        append_users(graph, 40);
        compute(llmaas_graph_end(graph));
    }
    llmaas_graph_free(graph);
    ggml_free(n.ctx);
}

/* Check more nodes, copies and arguments than fit a block of memory or the first node list, twice. */
static void test_graphs_grow(void) {
    enum { N_STEPS = 3000 };
    normalized     n       = new_normalized();
    llmaas_graph * graph   = llmaas_graph_new();
    int            n_calls = 0;
    struct {
        int * counter;
        char  ballast[300];
    } arg = {.counter = &n_calls};
    for (int round = 1; round <= 2; ++round) {
        llmaas_graph_begin(graph, n.graph);
        for (int i = 0; i < N_STEPS; ++i) {
            CHECK(llmaas_graph_step(graph, touch, &arg, sizeof arg));
        }
        struct ggml_tensor * copy = llmaas_graph_copy(graph, n.norm);
        CHECK(copy && copy != n.norm && memcmp(copy, n.norm, sizeof *copy) == 0);
        struct ggml_cgraph * rewritten = llmaas_graph_end(graph);
        CHECK(rewritten && rewritten->n_nodes == N_STEPS);
        compute(rewritten);
        CHECK(n_calls == round * N_STEPS);
    }
    llmaas_graph_free(graph);
    ggml_free(n.ctx);
}

static void test_tensors_are_contiguous_floats(void) {
    normalized     n     = new_normalized();
    llmaas_graph * graph = llmaas_graph_new();
    llmaas_graph_begin(graph, n.graph);
    float                      value;
    const struct ggml_tensor * tensor = llmaas_graph_tensor(graph, 3, 4, 5, 6, &value);
    CHECK(tensor->data == &value && ggml_is_contiguous(tensor) && ggml_nbytes(tensor) == 3 * 4 * 5 * 6 * sizeof value);
    llmaas_graph_free(graph);
    ggml_free(n.ctx);
}

/* -- failures ------------------------------------------------------------------------------------------------------ */

static void fail(void * arg, int ith, int nth) {
    llmaas_graph_fail(*(llmaas_graph **) arg);
    (void) ith, (void) nth;
}

static void test_a_step_s_failure_is_the_graph_s(void) {
    normalized     n     = new_normalized();
    llmaas_graph * graph = llmaas_graph_new();
    llmaas_graph_begin(graph, n.graph);
    CHECK(llmaas_graph_step(graph, fail, &graph, sizeof graph));
    struct ggml_cgraph * rewritten = llmaas_graph_end(graph);
    CHECK(rewritten && !llmaas_graph_failed(graph)); /* not before it ran */
    compute(rewritten);
    CHECK(llmaas_graph_failed(graph));
    llmaas_graph_begin(graph, n.graph); /* the next graph is independent */
    CHECK(!llmaas_graph_failed(graph));
    llmaas_graph_free(graph);
    ggml_free(n.ctx);
}

static void test_a_graph_without_memory_is_none(void) {
    normalized     n     = new_normalized();
    llmaas_graph * graph = llmaas_graph_new();
    llmaas_graph_begin(graph, n.graph);
    CHECK(!llmaas_graph_scratch(graph, 0, SIZE_MAX / 4));
    CHECK(llmaas_graph_failed(graph) && !llmaas_graph_end(graph));
    llmaas_graph_begin(graph, n.graph);
    CHECK(slot(graph, 0, 10) && llmaas_graph_end(graph));
    llmaas_graph_free(graph);
    llmaas_graph_free(NULL);
    ggml_free(n.ctx);
}

int main(void) {
    CHECK(!llmaas_abi_problem());
    test_norms_stay_fused_with_their_products();
    test_scratch_is_its_user_s_until_the_next_one();
    test_graphs_grow();
    test_tensors_are_contiguous_floats();
    test_a_step_s_failure_is_the_graph_s();
    test_a_graph_without_memory_is_none();
    return 0;
}
