/* How much attention each KV position gets.
 *
 * run() has no barrier inside, so threads share nothing while they work: each adds up probabilities by cell in memory of
 * its own, and the last one to finish a node adds everybody's up by position. Only that one touches the totals and the
 * map from cells to positions, under the mutex that read() takes. */
#include "llmaas/tap.h"

#include "ggml-cpu.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* ggml-cpu's own vector exp, exported but in no header: y = exp(x - max), returning their sum. */
double ggml_vec_soft_max_f32(int n, float * y, const float * x, float max) __attribute__((weak));

/* What one thread works in. */
typedef struct worker {
    double *  sums;   /* by cell, of this node */
    int64_t * deltas; /* by cell: how many more (query, head) see it than see the cell before */
    int32_t * runs;   /* visible columns of a query: from, to, from, to... */
    float *   bias;   /* of the visible columns, close together */
    float *   scores; /* likewise */
    void *    query;  /* in the type that keys are multiplied with */
    int64_t   n_kv;   /* what these arrays can hold */
    size_t    query_size;
    int32_t   n_runs;
    int32_t   n_visible;
    bool      has_bias;
    bool      is_used; /* sums and deltas are of this node */
    bool      has_failed;
} worker;

/* Where the tokens of one layer are; layers can have different caches. */
typedef struct cell_map {
    int32_t * positions; /* by cell; -1: unknown */
    int64_t   n_cells;
} cell_map;

struct llmaas_density {
    uint32_t        n_pos;
    uint32_t        n_layer;
    uint32_t        row_step;
    uint32_t        layer_step;
    atomic_int      n_finished; /* threads, of the current node */
    pthread_mutex_t mutex;      /* guards sums, counts and maps */
    double *        sums;       /* [n_pos] */
    uint64_t *      counts;     /* [n_pos] */
    cell_map *      maps;       /* [n_layer] */
    worker          workers[GGML_MAX_N_THREADS];
};

/* One attention node in the terms of both of its forms. */
typedef struct attention {
    const llmaas_tap_view *    view;
    const struct ggml_tensor * mask; /* or NULL */
    bool                       is_flash;
    int64_t                    n_tokens;
    int64_t                    n_kv;
    int64_t                    n_head;
    int64_t                    n_stream;
} attention;

static attention attention_of(const llmaas_tap_view * view) {
    const struct ggml_tensor * node     = view->node;
    const bool                 is_flash = node->op == GGML_OP_FLASH_ATTN_EXT;
    const struct ggml_tensor * query    = is_flash ? node->src[0] : node;
    return (attention){
        .view     = view,
        .mask     = is_flash ? node->src[3] : node->src[1],
        .is_flash = is_flash,
        .n_tokens = query->ne[1],
        .n_kv     = is_flash ? node->src[1]->ne[1] : node->ne[0],
        .n_head   = query->ne[2],
        .n_stream = query->ne[3],
    };
}

static int64_t cell_of(const llmaas_tap_view * view, int64_t token) {
    return view->cells ? ((const int64_t *) view->cells->data)[token] : token;
}

static int64_t position_of(const llmaas_tap_view * view, int64_t token) {
    return view->positions ? ((const int32_t *) view->positions->data)[token] : cell_of(view, token);
}

/* Whether column j is cell j. Not so where several caches take part, one for each stream, where a cache other than the
 * first does, or where the queries are of other tokens than the keys (cross attention). */
static bool has_cells(const attention * node) {
    const llmaas_tap_view * view = node->view;
    if (node->n_stream != 1 || node->n_kv > INT32_MAX || (view->positions && view->positions->ne[0] < node->n_tokens)) {
        return false;
    }
    if (!view->cells) {
        return node->n_kv == node->n_tokens;
    }
    if (view->cells->ne[0] != node->n_tokens) {
        return false;
    }
    for (int64_t token = 0; token < node->n_tokens; ++token) {
        const int64_t cell = cell_of(view, token);
        if (cell < 0 || cell >= node->n_kv) {
            return false;
        }
    }
    return true;
}

/* -- a thread's part ----------------------------------------------------------------------------------------------- */

static void worker_free(worker * w) {
    free(w->sums);
    free(w->deltas);
    free(w->runs);
    free(w->bias);
    free(w->scores);
    free(w->query);
    *w = (worker){0};
}

/* Room for a row of n_kv columns and a query. */
static bool worker_reserve(worker * w, int64_t n_kv, size_t query_size) {
    if (n_kv > w->n_kv || query_size > w->query_size) {
        n_kv           = n_kv > w->n_kv ? n_kv : w->n_kv;
        query_size     = query_size > w->query_size ? query_size : w->query_size;
        const size_t n = (size_t) n_kv;
        worker_free(w);
        w->sums       = malloc(n * sizeof *w->sums);
        w->deltas     = malloc((n + 1) * sizeof *w->deltas);
        w->runs       = malloc((n + 1) * sizeof *w->runs);
        w->bias       = malloc(n * sizeof *w->bias);
        w->scores     = malloc(n * sizeof *w->scores);
        w->query      = malloc(query_size + 1);
        w->n_kv       = n_kv;
        w->query_size = query_size;
        if (!w->sums || !w->deltas || !w->runs || !w->bias || !w->scores || !w->query) {
            worker_free(w);
            return false;
        }
    }
    return true;
}

static bool is_masked(const void * mask, enum ggml_type type, int64_t column) {
    return type == GGML_TYPE_F16 ? ((const ggml_fp16_t *) mask)[column] == 0xfc00
                                 : ((const float *) mask)[column] == -INFINITY;
}

/* Find the columns that one row of the mask lets through. */
static void find_visible(worker * w, const attention * node, int64_t row, int64_t head) {
    const struct ggml_tensor * mask = node->mask;
    w->n_runs    = 0;
    w->n_visible = 0;
    w->has_bias  = false;
    if (!mask) {
        w->runs[w->n_runs++] = 0;
        w->runs[w->n_runs++] = (int32_t) node->n_kv;
        w->n_visible         = (int32_t) node->n_kv;
        return;
    }
    const void * from =
        (const char *) mask->data + (size_t) row * mask->nb[1] + (size_t) (head % mask->ne[2]) * mask->nb[2];
    for (int64_t column = 0; column < node->n_kv;) {
        while (column < node->n_kv && is_masked(from, mask->type, column)) {
            ++column;
        }
        const int64_t start = column;
        while (column < node->n_kv && !is_masked(from, mask->type, column)) {
            ++column;
        }
        if (column > start) {
            w->runs[w->n_runs++] = (int32_t) start;
            w->runs[w->n_runs++] = (int32_t) column;
            if (node->is_flash) {
                ggml_fp16_to_fp32_row((const ggml_fp16_t *) from + start, w->bias + w->n_visible, column - start);
            }
            w->n_visible += (int32_t) (column - start);
        }
    }
    for (int32_t i = 0; node->is_flash && i < w->n_visible; ++i) {
        w->has_bias = w->has_bias || w->bias[i] != 0.0f;
    }
}

/* Of ALiBi: what a head multiplies the mask by. */
static float slope_of(float max_bias, int64_t head, int64_t n_head) {
    if (max_bias <= 0.0f) {
        return 1.0f;
    }
    int64_t n_even = 1;
    while (2 * n_even <= n_head) {
        n_even *= 2;
    }
    return head < n_even ? powf(2.0f, -max_bias * (float) (head + 1) / (float) n_even)
                         : powf(2.0f, -max_bias / 2.0f * (float) (2 * (head - n_even) + 1) / (float) n_even);
}

/* scores = exp(scores - max); returns their sum. */
static double exponentials(float * scores, int32_t n, float max) {
    if (ggml_vec_soft_max_f32) {
        return ggml_vec_soft_max_f32(n, scores, scores, max);
    }
    double sum = 0.0;
    for (int32_t i = 0; i < n; ++i) {
        scores[i] = expf(scores[i] - max);
        sum += (double) scores[i];
    }
    return sum;
}

/* Turn queries and keys into probabilities of the visible columns, as ggml-cpu does; returns what they still have to be
 * multiplied by. */
static double score_row(worker * w, const attention * node, int64_t row, int64_t head) {
    const struct ggml_tensor *         query  = node->view->node->src[0];
    const struct ggml_tensor *         key    = node->view->node->src[1];
    const struct ggml_tensor *         sinks  = node->view->node->src[4];
    const struct ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(key->type);
    float                              params[3]; /* scale, max_bias, logit_softcap */
    memcpy(params, node->view->node->op_params, sizeof params);
    const float softcap = params[2];
    const float scale   = softcap == 0.0f ? params[0] : params[0] / softcap;

    const int     d    = (int) key->ne[0];
    const char *  keys = (const char *) key->data + (size_t) (head / (node->n_head / key->ne[2])) * key->nb[2];
    const float * q    = (const float *) (const void *) ((const char *) query->data + (size_t) row * query->nb[1] +
                                                      (size_t) head * query->nb[2]);
    ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float(q, w->query, d);

    int32_t i = 0;
    for (int32_t run = 0; run < w->n_runs; run += 2) {
        for (int32_t column = w->runs[run]; column < w->runs[run + 1]; ++column) {
            traits->vec_dot(d, &w->scores[i++], 0, keys + (size_t) column * key->nb[1], 0, w->query, 0, 1);
        }
    }
    for (i = 0; i < w->n_visible; ++i) {
        w->scores[i] *= scale;
    }
    for (i = 0; softcap != 0.0f && i < w->n_visible; ++i) {
        w->scores[i] = softcap * tanhf(w->scores[i]);
    }
    const float slope = slope_of(params[1], head, node->n_head);
    for (i = 0; w->has_bias && i < w->n_visible; ++i) {
        w->scores[i] += slope * w->bias[i];
    }

    const float * sink = sinks ? (const float *) sinks->data + head : NULL;
    float         max  = sink ? *sink : -INFINITY;
    for (i = 0; i < w->n_visible; ++i) {
        max = w->scores[i] > max ? w->scores[i] : max;
    }
    const double sum = exponentials(w->scores, w->n_visible, max) + (sink ? exp((double) (*sink - max)) : 0.0);
    return 1.0 / sum;
}

static void add_row(worker * w, const attention * node, int64_t row, int64_t head) {
    const struct ggml_tensor * tensor = node->view->node;
    const float *              all    = NULL; /* columns of this row, if softmax computed them */
    double                     factor = 1.0;
    if (node->is_flash) {
        factor = score_row(w, node, row, head);
    } else {
        all = (const float *) (const void *) ((const char *) tensor->data + (size_t) row * tensor->nb[1] +
                                              (size_t) head * tensor->nb[2]);
    }
    const float * next = w->scores;
    for (int32_t run = 0; run < w->n_runs; run += 2) {
        const int32_t start         = w->runs[run];
        const int32_t end           = w->runs[run + 1];
        const float * probabilities = all ? all + start : next;
        for (int32_t i = 0; i < end - start; ++i) {
            w->sums[start + i] += factor * (double) probabilities[i];
        }
        w->deltas[start] += 1;
        w->deltas[end] -= 1;
        next += end - start;
    }
}

static size_t query_size(const attention * node) {
    if (!node->is_flash) {
        return 0;
    }
    const struct ggml_tensor * key = node->view->node->src[1];
    return ggml_row_size(ggml_get_type_traits_cpu(key->type)->vec_dot_type, key->ne[0]);
}

/* Thread ith's share of the (query, head) pairs that are looked at. */
static void add_share(const llmaas_density * density, worker * w, const attention * node, int ith, int nth) {
    int64_t n_pairs = 0;
    for (int64_t row = 0; row < node->n_tokens; ++row) {
        const int64_t position = position_of(node->view, row);
        if (position < 0 || position % density->row_step != density->row_step - 1) {
            continue;
        }
        bool is_known = false; /* heads share a row of the mask, as a rule */
        for (int64_t head = 0; head < node->n_head; ++head) {
            if (n_pairs++ % nth != ith) {
                continue;
            }
            if (!w->is_used) {
                if (!worker_reserve(w, node->n_kv, query_size(node))) {
                    w->has_failed = true;
                    return;
                }
                memset(w->sums, 0, (size_t) node->n_kv * sizeof *w->sums);
                memset(w->deltas, 0, (size_t) (node->n_kv + 1) * sizeof *w->deltas);
                w->is_used = true;
            }
            if (!is_known || (node->mask && node->mask->ne[2] > 1)) {
                find_visible(w, node, row, head);
                is_known = true;
            }
            if (w->n_visible) {
                add_row(w, node, row, head);
            }
        }
    }
}

/* -- the last thread's part ---------------------------------------------------------------------------------------- */

static bool map_reserve(cell_map * map, int64_t n_cells) {
    if (n_cells > map->n_cells) {
        int32_t * positions = realloc(map->positions, (size_t) n_cells * sizeof *positions);
        if (!positions) {
            return false;
        }
        memset(positions + map->n_cells, 0xff, (size_t) (n_cells - map->n_cells) * sizeof *positions);
        map->positions = positions;
        map->n_cells   = n_cells;
    }
    return true;
}

static void start_again(llmaas_density * density, const attention * node) {
    const llmaas_tap_view * view = node->view;
    for (int64_t token = 0; token < node->n_tokens; ++token) {
        const int64_t position = position_of(view, token);
        if (position >= 0 && position < density->n_pos) {
            density->sums[position]   = 0.0;
            density->counts[position] = 0;
        }
    }
}

static bool note_cells(cell_map * map, const attention * node) {
    if (node->view->cells) {
        if (!map_reserve(map, node->n_kv)) {
            return false;
        }
        for (int64_t token = 0; token < node->n_tokens; ++token) {
            map->positions[cell_of(node->view, token)] = (int32_t) position_of(node->view, token);
        }
    }
    return true;
}

static void add_to_positions(llmaas_density * density, const worker * w, const attention * node, const cell_map * map) {
    int64_t n_seen = 0;
    for (int64_t column = 0; column < node->n_kv; ++column) {
        const int64_t position = node->view->cells ? map->positions[column] : position_of(node->view, column);
        n_seen += w->deltas[column];
        if (position >= 0 && position < density->n_pos) {
            density->sums[position] += w->sums[column];
            density->counts[position] += (uint64_t) n_seen;
        }
    }
}

static void merge(llmaas_density * density, const attention * node, bool is_counted, int nth) {
    cell_map * map        = &density->maps[node->view->layer];
    bool       has_failed = !is_counted;
    for (int i = 0; i < nth; ++i) {
        has_failed = has_failed || density->workers[i].has_failed;
    }
    pthread_mutex_lock(&density->mutex);
    if (node->view->is_first && is_counted) {
        start_again(density, node);
    }
    if (is_counted && note_cells(map, node) && !has_failed) {
        for (int i = 0; i < nth; ++i) {
            if (density->workers[i].is_used) {
                add_to_positions(density, &density->workers[i], node, map);
            }
        }
    }
    pthread_mutex_unlock(&density->mutex);
}

static bool wants(void * user, int layer) {
    const llmaas_density * density = user;
    return layer >= 0 && (uint32_t) layer < density->n_layer &&
           (uint32_t) layer % density->layer_step == density->layer_step - 1;
}

static void run(void * user, const llmaas_tap_view * view, int ith, int nth) {
    llmaas_density * density = user;
    if (nth > GGML_MAX_N_THREADS || !wants(density, view->layer)) {
        return;
    }
    const attention node       = attention_of(view);
    const bool      is_counted = has_cells(&node);
    worker *        w          = &density->workers[ith];
    w->is_used                 = false;
    w->has_failed              = false;
    if (is_counted) {
        add_share(density, w, &node, ith, nth);
    }
    if (atomic_fetch_add(&density->n_finished, 1) + 1 == nth) {
        atomic_store(&density->n_finished, 0);
        merge(density, &node, is_counted, nth);
    }
}

/* -- for the owner ------------------------------------------------------------------------------------------------- */

llmaas_density * llmaas_density_new(uint32_t n_pos, uint32_t n_layer, uint32_t row_step, uint32_t layer_step) {
    if (!row_step || !layer_step) {
        return NULL;
    }
    llmaas_density * density = calloc(1, sizeof *density);
    if (!density) {
        return NULL;
    }
    density->n_pos      = n_pos;
    density->n_layer    = n_layer;
    density->row_step   = row_step;
    density->layer_step = layer_step;
    density->sums       = calloc((size_t) n_pos + 1, sizeof *density->sums);
    density->counts     = calloc((size_t) n_pos + 1, sizeof *density->counts);
    density->maps       = calloc((size_t) n_layer + 1, sizeof *density->maps);
    if (!density->sums || !density->counts || !density->maps || pthread_mutex_init(&density->mutex, NULL)) {
        free(density->sums);
        free(density->counts);
        free(density->maps);
        free(density);
        return NULL;
    }
    return density;
}

static void forget_cells(llmaas_density * density) {
    for (uint32_t layer = 0; layer < density->n_layer; ++layer) {
        free(density->maps[layer].positions);
        density->maps[layer] = (cell_map){0};
    }
}

void llmaas_density_free(llmaas_density * density) {
    if (!density) {
        return;
    }
    for (int i = 0; i < GGML_MAX_N_THREADS; ++i) {
        worker_free(&density->workers[i]);
    }
    forget_cells(density);
    pthread_mutex_destroy(&density->mutex);
    free(density->sums);
    free(density->counts);
    free(density->maps);
    free(density);
}

llmaas_tap llmaas_density_tap(llmaas_density * density) {
    return (llmaas_tap){.kind = LLMAAS_TAP_ATTENTION, .user = density, .wants = wants, .run = run};
}

llmaas_status llmaas_density_read(llmaas_density * density, uint32_t n, double * sums, uint64_t * counts) {
    if (!density || n > density->n_pos || (n && (!sums || !counts))) {
        return LLMAAS_EINVAL;
    }
    pthread_mutex_lock(&density->mutex);
    memcpy(sums, density->sums, n * sizeof *sums);
    memcpy(counts, density->counts, n * sizeof *counts);
    pthread_mutex_unlock(&density->mutex);
    return LLMAAS_OK;
}

void llmaas_density_reset(llmaas_density * density) {
    pthread_mutex_lock(&density->mutex);
    memset(density->sums, 0, density->n_pos * sizeof *density->sums);
    memset(density->counts, 0, density->n_pos * sizeof *density->counts);
    forget_cells(density);
    pthread_mutex_unlock(&density->mutex);
}
