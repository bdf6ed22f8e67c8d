/* How much attention each KV position gets.
 *
 * run() has no barrier inside, so threads share nothing while they work. Each adds up probabilities by cell in its own
 * memory. The last thread to finish a node adds all of them up by position. Only that thread touches the totals and the
 * cell maps, under the lock that read() takes. */
#include "attention/density_cells.h"
#include "base/fork_lock.h"
#include "base/ops.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP_TURN = 3, ALONE = 4 };

struct llmaas_density {
    uint32_t              n_pos;
    uint32_t              n_layer;
    uint32_t              row_step;
    uint32_t              layer_step;
    atomic_int            n_finished; /* threads that are done with the current node */
    llmaas_fork_lock      lock;       /* guards sums, counts and maps */
    double *              sums;       /* [n_pos] */
    uint64_t *            counts;     /* [n_pos] */
    llmaas_cell_map *     maps;       /* [n_layer]: layers can have different caches */
    llmaas_density_worker workers[GGML_MAX_N_THREADS];
};

/* Return whether column j is cell first_cell + j. That is false with several caches (one per stream), with a cache
 * other than the first, and where queries and keys are of different tokens (cross attention). */
static bool has_cells(const llmaas_attention * node) {
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
        const int64_t cell = ((const int64_t *) view->cells->data)[token];
        if (cell < node->first_cell || cell >= node->first_cell + node->n_kv) {
            return false;
        }
    }
    return true;
}

/* -- merging, on the last thread ----------------------------------------------------------------------------------- */

static void start_again(llmaas_density * density, const llmaas_attention * node) {
    const llmaas_tap_view * view = node->view;
    for (int64_t token = 0; token < node->n_tokens; ++token) {
        const int64_t position = llmaas_attention_position(view, token);
        if (position >= 0 && position < density->n_pos) {
            density->sums[position]   = 0.0;
            density->counts[position] = 0;
        }
    }
}

/* Sample different rows by layer and group: heads attend much alike for one query, so spreading the same number of
 * scores over more queries tells more. But a query that comes alone costs several times as much as one among others:
 * nothing is shared, and the graph waits. So fewer of those are sampled, under all heads, and each counts for
 * several. */
static llmaas_sampling sampling_of(const llmaas_density * density, const llmaas_attention * node) {
    const bool are_alone = node->n_tokens < density->row_step;
    return are_alone ? (llmaas_sampling) {ALONE * density->row_step, 0, ALONE}
                     : (llmaas_sampling) {density->row_step, GROUP_TURN, 1};
}

static void add_to_positions(
    llmaas_density * density, const llmaas_density_worker * w, const llmaas_attention * node, const llmaas_cell_map * map) {
    const uint32_t          weight = sampling_of(density, node).weight;
    const llmaas_tap_view * view   = node->view;
    int64_t                 n_seen = 0;
    for (int64_t column = 0; column < node->n_kv; ++column) {
        const int64_t position =
            view->cells ? llmaas_cell_map_position(map, node->first_cell + column)
                        : llmaas_attention_position(view, column);
        n_seen += w->deltas[column];
        if (position >= 0 && position < density->n_pos) {
            density->sums[position] += weight * w->sums[column];
            density->counts[position] += weight * (uint64_t) n_seen;
        }
    }
}

static void merge(llmaas_density * density, const llmaas_attention * node, int nth) {
    llmaas_cell_map * map     = &density->maps[node->view->layer];
    bool              is_lost = false;
    pthread_mutex_lock(&density->lock.mutex);
    if (node->view->is_first) {
        start_again(density, node);
    }
    if (node->view->cells) {
        is_lost = !llmaas_cell_map_reserve(map, node->first_cell + node->n_kv, density->n_pos);
        llmaas_cell_map_learn(map, node); /* if out of memory: only the cells there is room for */
    }
    for (int i = 0; i < nth; ++i) {
        is_lost = is_lost || density->workers[i].has_failed;
    }
    for (int i = 0; i < nth && !is_lost; ++i) {
        if (density->workers[i].is_used) {
            add_to_positions(density, &density->workers[i], node, map);
        }
    }
    pthread_mutex_unlock(&density->lock.mutex);
}

/* Return whether the tensor is an input, whose values are set before the graph is computed. */
static bool is_input(const struct ggml_tensor * tensor) {
    return !tensor || llmaas_op_of(tensor->view_src ? tensor->view_src : tensor) == LLMAAS_OP_NONE;
}

/* Settle a node with few tokens and no sampled query: remembering the tokens' cells is enough. */
static bool settles(void * user, const llmaas_tap_view * view) {
    llmaas_density *       density = user;
    const llmaas_attention node    = llmaas_attention_of(view);
    if (node.n_tokens >= density->row_step || !view->cells || !is_input(view->cells) || !is_input(view->positions) ||
        !has_cells(&node) || llmaas_density_is_sampled(&node, sampling_of(density, &node))) {
        return false;
    }
    llmaas_cell_map * map = &density->maps[view->layer];
    pthread_mutex_lock(&density->lock.mutex);
    const bool is_settled = llmaas_cell_map_reserve(map, node.first_cell + node.n_kv, density->n_pos) &&
                            !llmaas_cell_map_has_restored(map);
    if (is_settled) {
        if (view->is_first) {
            start_again(density, &node);
        }
        llmaas_cell_map_learn(map, &node);
    }
    pthread_mutex_unlock(&density->lock.mutex);
    return is_settled;
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
    const llmaas_attention node = llmaas_attention_of(view);
    if (!has_cells(&node)) {
        return;
    }
    llmaas_density_worker_run(&density->workers[ith], &node, sampling_of(density, &node), ith, nth);
    if (atomic_fetch_add(&density->n_finished, 1) + 1 == nth) {
        atomic_store(&density->n_finished, 0);
        merge(density, &node, nth);
    }
}

/* -- the API ------------------------------------------------------------------------------------------------------- */

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
    if (!density->sums || !density->counts || !density->maps || !llmaas_fork_lock_init(&density->lock, NULL)) {
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
        llmaas_cell_map_free(&density->maps[layer]);
    }
}

void llmaas_density_free(llmaas_density * density) {
    if (!density) {
        return;
    }
    for (int i = 0; i < GGML_MAX_N_THREADS; ++i) {
        llmaas_density_worker_free(&density->workers[i]);
    }
    forget_cells(density);
    llmaas_fork_lock_destroy(&density->lock);
    free(density->sums);
    free(density->counts);
    free(density->maps);
    free(density);
}

llmaas_tap llmaas_density_tap(llmaas_density * density) {
    return (llmaas_tap){.kind = LLMAAS_TAP_ATTENTION, .user = density, .wants = wants, .settles = settles, .run = run};
}

/* Restart positions at 0. */
static void clear(llmaas_density * density, uint32_t first, uint32_t n) {
    memset(density->sums + first, 0, n * sizeof *density->sums);
    memset(density->counts + first, 0, n * sizeof *density->counts);
}

static llmaas_status copy_out(
    llmaas_density * density, uint32_t n, double * sums, uint64_t * counts, bool is_taken) {
    if (!density || n > density->n_pos || (n && (!sums || !counts))) {
        return LLMAAS_EINVAL;
    }
    pthread_mutex_lock(&density->lock.mutex);
    for (uint32_t i = 0; i < n; ++i) {
        sums[i]   = density->sums[i];
        counts[i] = density->counts[i];
    }
    if (is_taken) {
        clear(density, 0, n);
    }
    pthread_mutex_unlock(&density->lock.mutex);
    return LLMAAS_OK;
}

llmaas_status llmaas_density_read(llmaas_density * density, uint32_t n, double * sums, uint64_t * counts) {
    return copy_out(density, n, sums, counts, false);
}

llmaas_status llmaas_density_take(llmaas_density * density, uint32_t n, double * sums, uint64_t * counts) {
    return copy_out(density, n, sums, counts, true);
}

llmaas_status llmaas_density_cells(llmaas_density * density, uint32_t n, int32_t * cells) {
    if (!density || n > density->n_pos || (n && !cells)) {
        return LLMAAS_EINVAL;
    }
    pthread_mutex_lock(&density->lock.mutex);
    for (uint32_t layer = 0; layer < density->n_layer; ++layer) {
        llmaas_cell_map_read(&density->maps[layer], n, cells + (size_t) layer * n);
    }
    pthread_mutex_unlock(&density->lock.mutex);
    return LLMAAS_OK;
}

llmaas_status llmaas_density_place(llmaas_density * density, uint32_t n_kept, uint32_t n, const int32_t * cells) {
    if (!density || n_kept > n || n > density->n_pos) {
        return LLMAAS_EINVAL;
    }
    pthread_mutex_lock(&density->lock.mutex);
    clear(density, n_kept, density->n_pos - n_kept);
    for (uint32_t layer = 0; layer < density->n_layer; ++layer) {
        llmaas_cell_map * map = &density->maps[layer];
        if (wants(density, (int) layer) && llmaas_cell_map_reserve(map, 0, density->n_pos)) {
            llmaas_cell_map_place(map, n_kept, n, cells ? cells + (size_t) layer * n : NULL);
        }
    }
    pthread_mutex_unlock(&density->lock.mutex);
    return LLMAAS_OK;
}

void llmaas_density_reset(llmaas_density * density) {
    pthread_mutex_lock(&density->lock.mutex);
    clear(density, 0, density->n_pos);
    forget_cells(density);
    pthread_mutex_unlock(&density->lock.mutex);
}
