/* Attention over visible cells only: the result is bit-identical to that of a graph which has no other cells. */
#include "check.h"

#include "attention/narrow.h"
#include "ggml-cpu.h"

#include <math.h>

enum { N_CELLS = 1280, D = 64, N_HEAD = 6, N_HEAD_KV = 2, MAX_ROWS = 70 };

/* Which of the cells that a graph reaches the queries see. */
typedef struct layout {
    int  first, end;
    int  hole, hole_end; /* these cells are hidden */
    bool is_causal;      /* query i does not see the last n_rows - 1 - i cells */
} layout;

typedef struct shape {
    enum ggml_type type;
    int            n_rows, n_threads;
    bool           is_flash, has_sinks;
    float          max_bias;
} shape;

static float uniform(void) { return (float) (rnd() >> 40) / (float) (1 << 23) - 1.0f; }

static struct ggml_context * context_new(void) {
    struct ggml_context * ctx = ggml_init((struct ggml_init_params){.mem_size = 32u << 20});
    CHECK(ctx);
    return ctx;
}

static bool sees(const layout * l, int n_rows, int row, int cell) {
    const int end = l->is_causal ? l->end - (n_rows - 1 - row) : l->end;
    return cell >= l->first && cell < end && !(cell >= l->hole && cell < l->hole_end);
}

/* Make the mask of cells first_cell.. of a layout. */
static struct ggml_tensor * new_mask(
    struct ggml_context * ctx, enum ggml_type type, const layout * l, int first_cell, int n_cells, const shape * of) {
    struct ggml_tensor * mask = ggml_new_tensor_2d(ctx, type, n_cells, of->n_rows);
    for (int i = 0; i < n_cells * of->n_rows; ++i) {
        const int   cell = first_cell + i % n_cells;
        const float bias = of->max_bias > 0.0f ? (float) (cell - l->end) : 0.0f;
        const float v    = sees(l, of->n_rows, i / n_cells, cell) ? bias : -INFINITY;
        if (type == GGML_TYPE_F16) {
            ((ggml_fp16_t *) mask->data)[i] = ggml_fp32_to_fp16(v);
        } else {
            ((float *) mask->data)[i] = v;
        }
    }
    return mask;
}

/* All cells, as floats. */
static struct cells {
    float query[MAX_ROWS * N_HEAD * D];
    float keys[N_CELLS * N_HEAD_KV * D];
    float values[N_CELLS * N_HEAD_KV * D];
    float sinks[N_HEAD];
} cells;

static void fill_cells(void) {
    for (float * v = (float *) &cells; v < (float *) (&cells + 1); ++v) {
        *v = uniform();
    }
}

static bool is_readable(const llmaas_visible * visible, int cell) {
    bool is_in_run = false;
    for (int i = 0; i < visible->n_runs; ++i) {
        is_in_run = is_in_run || (cell >= visible->runs[i].first && cell < visible->runs[i].first + visible->runs[i].n);
    }
    return visible->n_runs > 0 ? is_in_run : cell >= visible->first && cell < visible->first + visible->n;
}

/* Make a tensor [D, N_HEAD_KV, n_cells], or its transpose [n_cells, N_HEAD_KV * D]. Cells that must not be read are
 * NaN. */
static struct ggml_tensor * new_cache(struct ggml_context * ctx, const float * from, enum ggml_type type, int first,
                                      int n_cells, bool is_transposed, const llmaas_visible * readable) {
    enum { N = N_HEAD_KV * D };
    struct ggml_tensor * cache = is_transposed ? ggml_new_tensor_2d(ctx, type, n_cells, N)
                                               : ggml_new_tensor_3d(ctx, type, D, N_HEAD_KV, n_cells);
    float * to = malloc((size_t) (n_cells * N) * sizeof *to);
    CHECK(to);
    for (int cell = 0; cell < n_cells; ++cell) {
        const bool is_hidden = readable && !is_readable(readable, cell);
        for (int i = 0; i < N; ++i) {
            to[is_transposed ? i * n_cells + cell : cell * N + i] = is_hidden ? NAN : from[(first + cell) * N + i];
        }
    }
    if (type == GGML_TYPE_F32) {
        memcpy(cache->data, to, ggml_nbytes(cache));
    } else {
        ggml_get_type_traits_cpu(type)->from_float(to, cache->data, n_cells * N);
    }
    free(to);
    return cache;
}

/* Build attention over n_cells cells as llama.cpp does. Return the node with the result. */
static struct ggml_tensor * new_attention(
    struct ggml_context * ctx, const shape * of, const layout * l, int first, int n_cells, const llmaas_visible * readable) {
    const float          scale = 1.0f / sqrtf((float) D);
    struct ggml_tensor * query = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, D, N_HEAD, of->n_rows);
    struct ggml_tensor * sinks = of->has_sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, N_HEAD) : NULL;
    memcpy(query->data, cells.query, ggml_nbytes(query));
    if (sinks) {
        memcpy(sinks->data, cells.sinks, ggml_nbytes(sinks));
    }
    struct ggml_tensor * keys   = new_cache(ctx, cells.keys, of->type, first, n_cells, false, readable);
    struct ggml_tensor * values = new_cache(ctx, cells.values, of->type, first, n_cells, !of->is_flash, readable);
    struct ggml_tensor * mask =
        new_mask(ctx, of->is_flash ? GGML_TYPE_F16 : GGML_TYPE_F32, l, first, n_cells, of);
    struct ggml_tensor * q = ggml_permute(ctx, query, 0, 2, 1, 3);
    struct ggml_tensor * k = ggml_permute(ctx, keys, 0, 2, 1, 3);
    if (of->is_flash) {
        struct ggml_tensor * v    = ggml_permute(ctx, values, 0, 2, 1, 3);
        struct ggml_tensor * node = ggml_flash_attn_ext(ctx, q, k, v, mask, scale, of->max_bias, 0.0f);
        ggml_flash_attn_ext_add_sinks(node, sinks);
        return node;
    }
    struct ggml_tensor * probabilities = ggml_soft_max_ext(ctx, ggml_mul_mat(ctx, k, q), mask, scale, of->max_bias);
    ggml_soft_max_add_sinks(probabilities, sinks);
    ggml_set_name(probabilities, "kq_soft_max-0");
    return ggml_mul_mat(ctx, ggml_reshape_3d(ctx, values, n_cells, D, N_HEAD_KV), probabilities);
}

static struct ggml_cgraph * graph_of(struct ggml_context * ctx, struct ggml_tensor * node) {
    struct ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, node);
    return graph;
}

static void compute(struct ggml_cgraph * graph, int n_threads) {
    struct ggml_cplan plan = ggml_graph_plan(graph, n_threads, NULL);
    plan.work_data         = exact(plan.work_size);
    CHECK(ggml_graph_compute(graph, &plan) == GGML_STATUS_SUCCESS);
    free(plan.work_data);
}

/* Rewrite a graph as an engine does. Return how many nodes were replaced. */
static int narrow(llmaas_narrow * narrowing, llmaas_graph * graph, struct ggml_cgraph * original) {
    int n_changed = 0;
    llmaas_graph_begin(graph, original);
    for (int i = 0; i < original->n_nodes; ++i) {
        struct ggml_tensor * node     = original->nodes[i];
        const bool           is_flash = llmaas_op_of(node) == LLMAAS_OP_FLASH_ATTN_EXT;
        struct ggml_tensor * flash    = is_flash ? llmaas_narrow_flash(narrowing, graph, node) : NULL;
        const llmaas_visible *  visible     = llmaas_narrow_attention(narrowing, original, i);
        llmaas_narrow_nodes  three;
        if (visible && visible->n_runs > 0) {
            llmaas_runs_scores(visible, graph, node);
            llmaas_graph_append(graph, original->nodes[i + 1]);
            llmaas_runs_result(visible, graph, original->nodes[i + 2]);
            n_changed += 2;
            i += 2;
        } else if (visible) {
            CHECK(llmaas_narrow_products(visible, graph, original->nodes + i, &three));
            llmaas_graph_append(graph, three.scores);
            llmaas_graph_append(graph, three.probabilities);
            llmaas_graph_append(graph, three.result);
            n_changed += 3;
            i += 2;
        } else {
            llmaas_graph_append(graph, flash ? flash : node);
            n_changed += flash != NULL;
        }
    }
    return n_changed;
}

/* Check that the narrowed result is bit-identical to that of a graph with only the n cells that it is computed from, on
 * n_threads threads. */
static void check_attention(shape of, layout l, int n, int n_threads) {
    struct ggml_context * ctx       = context_new();
    llmaas_graph *        graph     = llmaas_graph_new();
    llmaas_narrow         narrowing = {0};
    struct ggml_cgraph *  sight     = graph_of(ctx, new_attention(ctx, &of, &l, 0, N_CELLS, NULL));
    CHECK(llmaas_narrow_read(&narrowing, sight));
    const llmaas_visible    visible     = narrowing.visible[0];
    struct ggml_tensor * found    = new_attention(ctx, &of, &l, 0, N_CELLS, &visible);
    struct ggml_cgraph * original = graph_of(ctx, found);
    CHECK(narrowing.n_visible == 1 && visible.n == n && visible.first <= l.first && visible.first + n >= l.end);
    CHECK(llmaas_narrow_read(&narrowing, original));
    CHECK(narrow(&narrowing, graph, original) == (of.is_flash ? 1 : 3));
    compute(llmaas_graph_end(graph), of.n_threads);
    struct ggml_tensor * expected = new_attention(ctx, &of, &l, (int) visible.first, n, NULL);
    compute(graph_of(ctx, expected), n_threads);
    CHECK(memcmp(found->data, expected->data, ggml_nbytes(expected)) == 0);
    CHECK(isfinite(((const float *) found->data)[0]));
    llmaas_graph_free(graph);
    ggml_free(ctx);
}

static const layout layouts[] = {
    {.first = 400, .end = N_CELLS, .is_causal = true}, /* others' cells before */
    {.first = 0, .end = 700, .is_causal = true},       /* behind */
    {.first = 333, .end = 1000, .is_causal = true},    /* around */
    {.first = 333, .end = 1000, .hole = 500, .hole_end = 600},
};

static void test_each_way(enum ggml_type type, bool is_flash, bool has_sinks, float max_bias) {
    const int n_cells[] = {1024, 768, 768, 768};
    for (int n_threads = 1; n_threads <= 2; ++n_threads) {
        for (int i = 0; i < 4; ++i) {
            const shape one = {type, 1, n_threads, is_flash, has_sinks, max_bias};
            shape       few = one, many = one;
            few.n_rows  = 7;
            many.n_rows = MAX_ROWS;
            check_attention(one, layouts[i], n_cells[i], n_threads);
            check_attention(few, layouts[i], n_cells[i], n_threads);
            check_attention(many, layouts[i], n_cells[i], n_threads);
        }
    }
}

static void test_a_range_is_as_if_there_were_no_other_cells(void) {
    test_each_way(GGML_TYPE_F16, true, false, 0.0f);
    test_each_way(GGML_TYPE_F16, true, true, 0.0f);
    test_each_way(GGML_TYPE_F16, true, false, 8.0f);
    test_each_way(GGML_TYPE_Q8_0, true, false, 0.0f);
    test_each_way(GGML_TYPE_F16, false, false, 0.0f);
    test_each_way(GGML_TYPE_F16, false, true, 8.0f);
    test_each_way(GGML_TYPE_F32, false, false, 0.0f);
}

/* Check one query whose cells are far apart: its heads are dealt out, so that no thread gets only hidden cells.
 * ggml-cpu then adds up as it does on one thread. */
static void test_holes(void) {
    const layout scattered = {.first = 10, .end = 1270, .hole = 100, .hole_end = 1000};
    const layout behind    = {.first = 333, .end = 1000, .hole = 600, .hole_end = 900};
    for (int n_threads = 1; n_threads <= 4; ++n_threads) {
        check_attention((shape){GGML_TYPE_F16, 1, n_threads, true, false, 0.0f}, scattered, N_CELLS, 1);
        check_attention((shape){GGML_TYPE_F16, 1, n_threads, true, false, 0.0f}, behind, 768, 1);
        /* sinks and slopes are per head, so cells are dealt out as usual there */
        check_attention((shape){GGML_TYPE_F16, 1, n_threads, true, true, 0.0f}, behind, 768, n_threads);
        check_attention((shape){GGML_TYPE_F16, 1, n_threads, true, false, 8.0f}, behind, 768, n_threads);
    }
}

/* -- runs of cells --------------------------------------------------------------------------------------------------- */

static double difference(const struct ggml_tensor * a, const struct ggml_tensor * b) {
    double most = 0.0;
    for (int64_t i = 0; i < ggml_nelements(a); ++i) {
        const double d = fabs((double) (((const float *) a->data)[i] - ((const float *) b->data)[i]));
        CHECK(isfinite(d));
        most = d > most ? d : most;
    }
    return most;
}

/* Check runs without flash attention: cells between runs are not read; sums are those of all cells in another order. */
static void check_runs(shape of, layout l, int n_runs) {
    struct ggml_context * ctx       = context_new();
    llmaas_graph *        graph     = llmaas_graph_new();
    llmaas_narrow         narrowing = {0};
    struct ggml_tensor *  expected  = new_attention(ctx, &of, &l, 0, N_CELLS, NULL);
    struct ggml_cgraph *  stock     = graph_of(ctx, expected);
    CHECK(llmaas_narrow_read(&narrowing, stock));
    const llmaas_visible visible = narrowing.visible[0];
    CHECK(visible.n_runs == n_runs);
    struct ggml_tensor * found    = new_attention(ctx, &of, &l, 0, N_CELLS, &visible);
    struct ggml_cgraph * original = graph_of(ctx, found);
    memset(found->src[1]->src[0]->data, 0xff, ggml_nbytes(found->src[1])); /* NaN */
    CHECK(llmaas_narrow_read(&narrowing, original));
    CHECK(narrow(&narrowing, graph, original) == 2);
    compute(llmaas_graph_end(graph), of.n_threads);
    compute(stock, of.n_threads);
    CHECK(difference(found, expected) <= 1e-3);
    llmaas_graph_free(graph);
    ggml_free(ctx);
}

static void test_runs(void) {
    const layout split  = {.first = 10, .end = 1270, .hole = 200, .hole_end = 600, .is_causal = true};
    const layout behind = {.first = 400, .end = 1200, .hole = 500, .hole_end = 1000};
    const int    rows[] = {1, 7, MAX_ROWS};
    for (int i = 0; i < 3; ++i) {
        for (int n_threads = 1; n_threads <= 3; n_threads += 2) {
            check_runs((shape){GGML_TYPE_F16, rows[i], n_threads, false, false, 0.0f}, split, 2);
            check_runs((shape){GGML_TYPE_F16, rows[i], n_threads, false, true, 8.0f}, behind, 2);
            check_runs((shape){GGML_TYPE_F32, rows[i], n_threads, false, false, 0.0f}, behind, 2);
        }
    }
    check_attention((shape){GGML_TYPE_F16, 1, 1, false, false, 0.0f}, layouts[3], 768, 1); /* the hole is too small */
}

/* -- what stays unchanged -------------------------------------------------------------------------------------------- */

/* Return whether narrowing is worthwhile, for a node without operand values: only its mask is read. */
static bool is_worth_it(struct ggml_context * ctx, struct ggml_tensor * mask) {
    struct ggml_tensor * scores = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, mask->ne[0], mask->ne[1], 1, mask->ne[3]);
    llmaas_narrow        narrowing;
    return llmaas_narrow_read(&narrowing, graph_of(ctx, ggml_soft_max_ext(ctx, scores, mask, 1.0f, 0.0f)));
}

static void test_what_is_not_worth_it(void) {
    struct ggml_context * ctx = context_new();
    const shape           of  = {.n_rows = 3};
    const layout none = {0}, all = {.end = N_CELLS}, most = {.first = 100, .end = N_CELLS - 100}, some = {.end = 1024};
    CHECK(!is_worth_it(ctx, new_mask(ctx, GGML_TYPE_F16, &none, 0, N_CELLS, &of)));
    CHECK(!is_worth_it(ctx, new_mask(ctx, GGML_TYPE_F16, &all, 0, N_CELLS, &of)));
    CHECK(!is_worth_it(ctx, new_mask(ctx, GGML_TYPE_F16, &most, 0, N_CELLS, &of)));
    CHECK(is_worth_it(ctx, new_mask(ctx, GGML_TYPE_F16, &some, 0, N_CELLS, &of)));
    CHECK(!is_worth_it(ctx, new_mask(ctx, GGML_TYPE_F16, &some, 0, 1279, &of)));
    ggml_free(ctx);
}

/* Check masks that are computed in the graph, of several streams, or of an unusual type. */
static void test_masks_that_cannot_be_read(void) {
    struct ggml_context * ctx     = context_new();
    const shape           of      = {.n_rows = 3};
    const layout          some    = {.end = 300};
    struct ggml_tensor *  mask    = new_mask(ctx, GGML_TYPE_F32, &some, 0, N_CELLS, &of);
    struct ggml_tensor *  streams = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, N_CELLS, 3, 1, 2);
    for (int64_t i = 0; i < ggml_nelements(streams); ++i) {
        ((float *) streams->data)[i] = i % N_CELLS < 300 ? 0.0f : -INFINITY;
    }
    CHECK(is_worth_it(ctx, mask));
    CHECK(!is_worth_it(ctx, ggml_cast(ctx, mask, GGML_TYPE_F16)));
    CHECK(!is_worth_it(ctx, streams));
    ggml_free(ctx);
}

/* -- reading masks --------------------------------------------------------------------------------------------------- */

/* Check random masks of any size, in memory that ends with them. */
static void test_ranges_of_random_masks(void) {
    for (int round = 0; round < 300; ++round) {
        struct ggml_context * ctx  = context_new();
        const shape           of   = {.n_rows = 1 + (int) rnd_below(4), .max_bias = (float) rnd_below(2)};
        const int             n    = 300 + (int) rnd_below(1000);
        const int             from = (int) rnd_below((uint32_t) n);
        const layout          l    = {.first = from, .end = from + 1 + (int) rnd_below((uint32_t) (n - from))};
        struct ggml_tensor *  mask = new_mask(ctx, round % 2 ? GGML_TYPE_F16 : GGML_TYPE_F32, &l, 0, n, &of);
        uint8_t *             copy = exact_copy(mask->data, ggml_nbytes(mask));
        mask->data                 = copy;
        llmaas_narrow        narrowing;
        struct ggml_tensor * scores = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, of.n_rows);
        struct ggml_cgraph * graph  = graph_of(ctx, ggml_soft_max_ext(ctx, scores, mask, 1.0f, 0.0f));
        const int            n_visible = (l.end - l.first + 255) / 256 * 256;
        CHECK(llmaas_narrow_read(&narrowing, graph) == (n - n_visible >= 256));
        CHECK(narrowing.visible[0].is_narrow == (n - n_visible >= 256) && !narrowing.visible[0].has_holes);
        if (narrowing.visible[0].is_narrow) {
            CHECK(narrowing.visible[0].n == n_visible && narrowing.visible[0].first + n_visible <= n);
            CHECK(narrowing.visible[0].first == (l.first + n_visible <= n ? l.first : n - n_visible));
        }
        free(copy);
        ggml_free(ctx);
    }
}

int main(void) {
    fill_cells();
    test_a_range_is_as_if_there_were_no_other_cells();
    test_holes();
    test_runs();
    test_what_is_not_worth_it();
    test_masks_that_cannot_be_read();
    test_ranges_of_random_masks();
    return 0;
}
