#include "attention/density_worker.h"

#include "attention/density_math.h"
#include "base/ops.h"
#include "ggml-cpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* With fewer queries than this in a group, single queries are as fast: making tiles takes time. */
enum { MIN_TILED_QUERIES = 16 };

/* Tiles must fit in the processor's second-level cache. */
enum { MAX_KEYS_BYTES = 2 << 20 };

llmaas_attention llmaas_attention_of(const llmaas_tap_view * view) {
    const struct ggml_tensor * node     = view->node;
    const bool                 is_flash = llmaas_op_of(node) == LLMAAS_OP_FLASH_ATTN_EXT;
    const struct ggml_tensor * query    = is_flash ? node->src[0] : node;
    return (llmaas_attention){
        .view      = view,
        .mask      = is_flash ? node->src[3] : node->src[1],
        .is_flash  = is_flash,
        .n_tokens  = query->ne[1],
        .n_kv      = is_flash ? node->src[1]->ne[1] : node->ne[0],
        .first_cell = view->first_cell,
        .n_head    = query->ne[2],
        .n_head_kv = is_flash ? node->src[1]->ne[2] : node->ne[2],
        .n_stream  = query->ne[3],
    };
}

int64_t llmaas_attention_position(const llmaas_tap_view * view, int64_t token) {
    if (view->positions) {
        return ((const int32_t *) view->positions->data)[token];
    }
    return view->cells ? ((const int64_t *) view->cells->data)[token] : token;
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

void llmaas_density_worker_free(llmaas_density_worker * w) {
    free(w->sums);
    free(w->deltas);
    free(w->scores);
    free(w->keys);
    free(w->is_made);
    free(w->is_needed);
    free(w->queries);
    free(w->rounded);
    free(w->bias);
    free(w->runs);
    *w = (llmaas_density_worker){0};
}

static bool reserve(llmaas_density_worker * w, int64_t n_kv, int64_t d) {
    const int64_t n_padded = (n_kv + LLMAAS_TILE - 1) / LLMAAS_TILE * LLMAAS_TILE;
    if (n_padded <= w->n_padded && d <= w->d) {
        return true;
    }
    const size_t n = (size_t) (n_padded > w->n_padded ? n_padded : w->n_padded);
    const size_t m = (size_t) (d > w->d ? d : w->d);
    llmaas_density_worker_free(w);
    w->sums      = malloc(n * sizeof *w->sums);
    w->deltas    = malloc((n + 1) * sizeof *w->deltas);
    w->scores    = malloc(n * LLMAAS_BLOCK * sizeof *w->scores);
    w->is_made   = malloc(n / LLMAAS_TILE * sizeof *w->is_made);
    w->is_needed = malloc(n / LLMAAS_TILE * sizeof *w->is_needed);
    w->queries   = malloc((m + 1) * (LLMAAS_BLOCK + 1) * sizeof *w->queries);
    w->rounded   = malloc((m + 1) * 2 * sizeof(float)); /* an upper bound for every type */
    w->bias      = malloc(n * sizeof *w->bias);
    w->runs      = malloc((n + 1) * sizeof *w->runs);
    w->n_padded  = (int64_t) n;
    w->d         = (int64_t) m;
    if (w->sums && w->deltas && w->scores && w->is_made && w->is_needed && w->queries && w->rounded && w->bias &&
        w->runs) {
        return true;
    }
    llmaas_density_worker_free(w);
    return false;
}

static bool reserve_keys(llmaas_density_worker * w, int64_t n_keys) {
    if (n_keys > w->n_keys) {
        free(w->keys);
        w->keys   = aligned_alloc(64, (size_t) n_keys * sizeof *w->keys); /* a tile is a multiple of 64 bytes */
        w->n_keys = w->keys ? n_keys : 0;
    }
    return n_keys <= w->n_keys;
}

/* -- scores -------------------------------------------------------------------------------------------------------- */

static const char * keys_of(const llmaas_attention * node, int64_t group, int64_t column) {
    const struct ggml_tensor * key = node->view->node->src[1];
    return (const char *) key->data + (size_t) group * key->nb[2] + (size_t) column * key->nb[1];
}

/* Convert a query to the type that ggml-cpu multiplies this type of keys with. */
static void round_query(llmaas_density_worker * w, const llmaas_attention * node, int64_t row, int64_t head) {
    const struct ggml_tensor * query = node->view->node->src[0];
    const struct ggml_tensor * key   = node->view->node->src[1];
    const enum ggml_type       type  = ggml_get_type_traits_cpu(key->type)->vec_dot_type;
    const char * from = (const char *) query->data + (size_t) row * query->nb[1] + (size_t) head * query->nb[2];
    ggml_get_type_traits_cpu(type)->from_float((const float *) (const void *) from, w->rounded, key->ne[0]);
}

/* Return whether the type converts to floats. Q8_1 does not; queries are converted to it for keys of Q4_1 and Q5_1. */
static bool has_floats(enum ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || ggml_get_type_traits(type)->to_float;
}

static void to_floats(enum ggml_type type, const void * from, float * to, int64_t n) {
    if (type == GGML_TYPE_F32) {
        memcpy(to, from, (size_t) n * sizeof *to);
    } else if (type == GGML_TYPE_F16) {
        ggml_cpu_fp16_to_fp32(from, to, n); /* vectorized, unlike to_float */
    } else {
        ggml_get_type_traits(type)->to_float(from, to, n);
    }
}

static void make_tile(llmaas_density_worker * w, const llmaas_attention * node, int64_t group, int64_t tile) {
    const int64_t d     = node->view->node->src[1]->ne[0];
    float *       to    = w->keys + tile * LLMAAS_TILE * d;
    float *       key   = w->queries + LLMAAS_BLOCK * d;
    const int64_t first = tile * LLMAAS_TILE;
    for (int64_t i = 0; i < LLMAAS_TILE; ++i) {
        if (first + i < node->n_kv) {
            to_floats(node->view->node->src[1]->type, keys_of(node, group, first + i), key, d);
        } else {
            memset(key, 0, (size_t) d * sizeof *key);
        }
        for (int64_t j = 0; j < d; ++j) {
            to[j * LLMAAS_TILE + i] = key[j];
        }
    }
}

/* Turn products of a query and the keys into probabilities, as ggml-cpu does: replace the visible columns of
 * scores[n_kv]. Return the factor by which they must still be multiplied. */
static double to_probabilities(
    const llmaas_density_worker * w, const llmaas_attention * node, int64_t head, float * scores) {
    const struct ggml_tensor * sinks = node->view->node->src[4];
    float                      params[3]; /* scale, max_bias, logit_softcap */
    memcpy(params, node->view->node->op_params, sizeof params);
    const float   softcap = params[2];
    const float   scale   = softcap == 0.0f ? params[0] : params[0] / softcap;
    const float   slope   = llmaas_alibi_slope(params[1], head, node->n_head);
    const float * sink    = sinks ? (const float *) sinks->data + head : NULL;
    float         max     = sink ? *sink : -INFINITY;
    for (int32_t run = 0; run < w->n_runs; run += 2) {
        const int32_t end = w->runs[run + 1];
        int32_t       i;
        for (i = w->runs[run]; i < end; ++i) {
            scores[i] *= scale;
        }
        for (i = w->runs[run]; softcap != 0.0f && i < end; ++i) {
            scores[i] = softcap * tanhf(scores[i]);
        }
        for (i = w->runs[run]; w->has_bias && i < end; ++i) {
            scores[i] += slope * w->bias[i];
        }
        max = fmaxf(max, llmaas_max(scores + w->runs[run], end - w->runs[run]));
    }
    double sum = sink ? exp((double) (*sink - max)) : 0.0;
    for (int32_t run = 0; run < w->n_runs; run += 2) {
        sum += llmaas_exponentials(scores + w->runs[run], w->runs[run + 1] - w->runs[run], max);
    }
    return 1.0 / sum;
}

static void add_probabilities(llmaas_density_worker * w, const float * probabilities, double factor) {
    for (int32_t run = 0; run < w->n_runs; run += 2) {
        const int32_t start = w->runs[run];
        const int32_t end   = w->runs[run + 1];
        for (int32_t i = start; i < end; ++i) {
            w->sums[i] += factor * (double) probabilities[i];
        }
        w->deltas[start] += 1;
        w->deltas[end] -= 1;
    }
}

/* -- pairs of a query and a head ----------------------------------------------------------------------------------- */

typedef struct pair {
    int64_t row, head;
} pair;

/* Add probabilities that softmax computed. */
static void add_computed(llmaas_density_worker * w, const llmaas_attention * node, pair at) {
    const struct ggml_tensor * all = node->view->node;
    const char * from = (const char *) all->data + (size_t) at.row * all->nb[1] + (size_t) at.head * all->nb[2];
    llmaas_density_find_visible(w, node, at.row, at.head);
    add_probabilities(w, (const float *) (const void *) from, 1.0);
}

static void add_one(llmaas_density_worker * w, const llmaas_attention * node, int64_t group, pair at) {
    const struct ggml_tensor * key = node->view->node->src[1];
    const ggml_vec_dot_t       dot = ggml_get_type_traits_cpu(key->type)->vec_dot;
    llmaas_density_find_visible(w, node, at.row, at.head);
    round_query(w, node, at.row, at.head);
    for (int32_t run = 0; run < w->n_runs; run += 2) {
        for (int32_t i = w->runs[run]; i < w->runs[run + 1]; ++i) {
            dot((int) key->ne[0], &w->scores[i], 0, keys_of(node, group, i), 0, w->rounded, 0, 1);
        }
    }
    add_probabilities(w, w->scores, to_probabilities(w, node, at.head, w->scores));
}

static void add_block(
    llmaas_density_worker * w, const llmaas_attention * node, int64_t group, const pair * pairs, int64_t n_pairs) {
    const struct ggml_tensor * key     = node->view->node->src[1];
    const int64_t              d       = key->ne[0];
    const int64_t              n_tiles = (node->n_kv + LLMAAS_TILE - 1) / LLMAAS_TILE;
    memset(w->is_needed, 0, (size_t) n_tiles * sizeof *w->is_needed);
    for (int64_t i = 0; i < LLMAAS_BLOCK; ++i) { /* the last query fills up the last block */
        const pair at = pairs[i < n_pairs ? i : n_pairs - 1];
        llmaas_density_find_visible(w, node, at.row, at.head);
        for (int32_t run = 0; run < w->n_runs; run += 2) {
            for (int64_t tile = w->runs[run] / LLMAAS_TILE; tile * LLMAAS_TILE < w->runs[run + 1]; ++tile) {
                w->is_needed[tile] = true;
            }
        }
        float * query = w->queries + LLMAAS_BLOCK * d;
        round_query(w, node, at.row, at.head);
        to_floats(ggml_get_type_traits_cpu(key->type)->vec_dot_type, w->rounded, query, d);
        for (int64_t j = 0; j < d; ++j) {
            w->queries[LLMAAS_BLOCK * j + i] = query[j];
        }
    }
    for (int64_t tile = 0; tile < n_tiles; ++tile) {
        if (w->is_needed[tile]) {
            if (!w->is_made[tile]) {
                make_tile(w, node, group, tile);
                w->is_made[tile] = true;
            }
            llmaas_multiply_tile(
                w->keys + tile * LLMAAS_TILE * d, w->queries, d, w->scores + tile * LLMAAS_TILE, w->n_padded);
        }
    }
    for (int64_t i = 0; i < n_pairs; ++i) {
        float * scores = w->scores + i * w->n_padded;
        llmaas_density_find_visible(w, node, pairs[i].row, pairs[i].head);
        add_probabilities(w, scores, to_probabilities(w, node, pairs[i].head, scores));
    }
}

/* Prepare for a node. False if ggml-cpu cannot multiply with such keys, or memory ran out. */
static bool begin(llmaas_density_worker * w, const llmaas_attention * node) {
    int64_t d = 0;
    if (node->is_flash) {
        const struct ggml_tensor *          key    = node->view->node->src[1];
        const struct ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(key->type);
        if (!traits->vec_dot || !ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float) {
            return false;
        }
        d = key->ne[0];
    }
    if (!reserve(w, node->n_kv, d)) {
        return false;
    }
    memset(w->sums, 0, (size_t) node->n_kv * sizeof *w->sums);
    memset(w->deltas, 0, (size_t) (node->n_kv + 1) * sizeof *w->deltas);
    w->row = -1;
    return true;
}

/* Return the first sampled row after `row`, or n_tokens. */
static int64_t next_sampled(const llmaas_attention * node, int64_t group, int64_t row, llmaas_sampling sampling) {
    for (++row; row < node->n_tokens; ++row) {
        const int64_t position = llmaas_attention_position(node->view, row);
        const int64_t turn     = position + 5 * node->view->layer + sampling.group_turn * group;
        if (position >= 0 && turn % sampling.row_step == sampling.row_step - 1) {
            break;
        }
    }
    return row;
}

static int64_t count_sampled(const llmaas_attention * node, int64_t group, llmaas_sampling sampling) {
    int64_t n_rows = 0;
    for (int64_t row = -1; (row = next_sampled(node, group, row, sampling)) < node->n_tokens;) {
        ++n_rows;
    }
    return n_rows;
}

bool llmaas_density_is_sampled(const llmaas_attention * node, llmaas_sampling sampling) {
    bool is_sampled = false;
    for (int64_t group = 0; group < node->n_head_kv && !is_sampled; ++group) {
        is_sampled = next_sampled(node, group, -1, sampling) < node->n_tokens;
    }
    return is_sampled;
}

/* Return whether this thread's n queries of a group are worth making tiles; if so, make room for them. */
static bool can_tile(llmaas_density_worker * w, const llmaas_attention * node, int64_t n_queries) {
    if (!node->is_flash || n_queries < MIN_TILED_QUERIES) {
        return false;
    }
    const struct ggml_tensor * key     = node->view->node->src[1];
    const int64_t              n_tiles = (node->n_kv + LLMAAS_TILE - 1) / LLMAAS_TILE;
    const int64_t              n_keys  = n_tiles * LLMAAS_TILE * key->ne[0];
    if (!has_floats(key->type) || !has_floats(ggml_get_type_traits_cpu(key->type)->vec_dot_type)) {
        return false;
    }
    if (n_keys > (int64_t) (MAX_KEYS_BYTES / sizeof(float)) || !reserve_keys(w, n_keys)) {
        return false;
    }
    memset(w->is_made, 0, (size_t) n_tiles * sizeof *w->is_made);
    return true;
}

/* Deal rows out to threads in turn, which shares a causal mask's work evenly. */
static void add_group(llmaas_density_worker * w, const llmaas_attention * node, int64_t group, llmaas_sampling sampling,
                      int64_t turn, int ith, int nth) {
    const int64_t n_shared = node->n_head / node->n_head_kv;
    const bool    is_tiled = can_tile(w, node, count_sampled(node, group, sampling) / nth * n_shared);
    pair          pairs[LLMAAS_BLOCK];
    int64_t       n_pairs = 0;
    for (int64_t row = -1; (row = next_sampled(node, group, row, sampling)) < node->n_tokens;) {
        if (turn++ % nth != ith) {
            continue;
        }
        for (int64_t i = 0; i < n_shared; ++i) {
            const pair at = {row, group * n_shared + i};
            if (is_tiled) {
                pairs[n_pairs++] = at;
                if (n_pairs == LLMAAS_BLOCK) {
                    add_block(w, node, group, pairs, n_pairs);
                    n_pairs = 0;
                }
            } else if (node->is_flash) {
                add_one(w, node, group, at);
            } else {
                add_computed(w, node, at);
            }
        }
    }
    if (n_pairs) {
        add_block(w, node, group, pairs, n_pairs);
    }
}

void llmaas_density_worker_run(
    llmaas_density_worker * w, const llmaas_attention * node, llmaas_sampling sampling, int ith, int nth) {
    int64_t n_rows = 0;
    for (int64_t group = 0; group < node->n_head_kv; ++group) {
        n_rows += count_sampled(node, group, sampling);
    }
    w->has_failed = n_rows > 0 && !begin(w, node);
    w->is_used    = n_rows > 0 && !w->has_failed;
    int64_t turn  = node->view->layer; /* the few rows of a single token go to a different thread in each layer */
    for (int64_t group = 0; w->is_used && group < node->n_head_kv; ++group) {
        add_group(w, node, group, sampling, turn, ith, nth);
        turn += count_sampled(node, group, sampling);
    }
}
