/* Attention without FLASH_ATTN_EXT over cells in several places: scores and results are multiplied run by run. Softmax
 * covers all cells, which costs it little, so that taps see all probabilities as usual. */
#include "attention/narrow.h"

#include <string.h>

/* -- scores -------------------------------------------------------------------------------------------------------- */

typedef struct gaps {
    const struct ggml_tensor * scores;
    llmaas_run                 gaps[LLMAAS_MAX_RUNS + 1];
    int                        n_gaps;
} gaps;

static void add_gap(gaps * all, int64_t first, int64_t end) {
    if (first < end) {
        all->gaps[all->n_gaps++] = (llmaas_run) {first, end - first};
    }
}

/* Clear the gaps. The mask hides their scores, whatever their value, but they must be numbers. */
static void clear_gaps(void * arg, int ith, int nth) {
    const gaps *  all    = arg;
    const int64_t n_rows = ggml_nrows(all->scores);
    for (int64_t row = ith; row < n_rows; row += nth) {
        float * scores = (float *) all->scores->data + row * all->scores->ne[0];
        for (int i = 0; i < all->n_gaps; ++i) {
            memset(scores + all->gaps[i].first, 0, (size_t) all->gaps[i].n * sizeof *scores);
        }
    }
}

void llmaas_runs_scores(const llmaas_visible * visible, llmaas_graph * graph, const struct ggml_tensor * scores) {
    gaps    all = {.scores = scores};
    int64_t end = 0;
    for (int i = 0; i < visible->n_runs; ++i) {
        const llmaas_run *   run  = &visible->runs[i];
        struct ggml_tensor * part = llmaas_graph_slice(graph, scores, 0, run->first, run->n);
        struct ggml_tensor * keys = llmaas_graph_slice(graph, scores->src[0], 1, run->first, run->n);
        if (!part || !keys) {
            return;
        }
        part->src[0] = keys;
        llmaas_graph_append(graph, part);
        add_gap(&all, end, run->first);
        end = run->first + run->n;
    }
    add_gap(&all, end, scores->ne[0]);
    llmaas_graph_step(graph, clear_gaps, &all, sizeof all);
}

/* -- results ------------------------------------------------------------------------------------------------------- */

static struct ggml_tensor * product(
    llmaas_graph * graph, const struct ggml_tensor * result, const llmaas_run * run, void * data) {
    struct ggml_tensor * part          = llmaas_graph_copy(graph, result);
    struct ggml_tensor * values        = llmaas_graph_slice(graph, result->src[0], 0, run->first, run->n);
    struct ggml_tensor * probabilities = llmaas_graph_slice(graph, result->src[1], 0, run->first, run->n);
    if (!part || !values || !probabilities || !data) {
        return NULL;
    }
    part->data   = data;
    part->src[0] = values;
    part->src[1] = probabilities;
    llmaas_graph_append(graph, part);
    return part;
}

static void add(llmaas_graph * graph, const struct ggml_tensor * result, struct ggml_tensor * part) {
    struct ggml_tensor * sum   = llmaas_graph_copy(graph, result);
    struct ggml_tensor * so_far = llmaas_graph_copy(graph, result);
    if (sum && so_far) {
        sum->op = llmaas_op_number(LLMAAS_OP_ADD);
        memset(sum->op_params, 0, sizeof sum->op_params);
        sum->src[0] = so_far;
        sum->src[1] = part;
        llmaas_graph_append(graph, sum);
    }
}

void llmaas_runs_result(const llmaas_visible * visible, llmaas_graph * graph, const struct ggml_tensor * result) {
    product(graph, result, &visible->runs[0], result->data);
    for (int i = 1; i < visible->n_runs; ++i) {
        void *               data = llmaas_graph_scratch(graph, 0, ggml_nbytes(result));
        struct ggml_tensor * part = product(graph, result, &visible->runs[i], data);
        if (part) {
            add(graph, result, part);
        }
    }
}
