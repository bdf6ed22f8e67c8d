/* Adapters: low-rank terms that are added to a weight's products, by level. */
#include "base/rows.h"
#include "llmaas/low_rank.h"
#include "weights/weights_table.h"

#include <stdlib.h>
#include <string.h>

enum { BATCH = LLMAAS_RANK_BATCH, BLOCK = LLMAAS_RANK_BLOCK };

/* -- claims ------------------------------------------------------------------------------------------------------- */

static size_t a_bytes(const llmaas_adapter * one) { return llmaas_low_rank_bytes(one->rank, one->n_columns); }
static size_t b_bytes(const llmaas_adapter * one) { return llmaas_low_rank_bytes(one->rank, one->n_rows); }

static bool are_sound(const llmaas_adapter * adapters, uint32_t n_levels) {
    bool are = n_levels >= 1 && n_levels <= LLMAAS_MAX_LEVELS;
    for (uint32_t level = 0; are && level < n_levels; level++) {
        are = adapters[level].rank <= LLMAAS_MAX_RANK &&
              (adapters[level].rank == 0 || (adapters[level].n_rows > 0 && adapters[level].n_columns > 0));
    }
    return are;
}

/* Copy the adapters of all levels, with their matrices, to one piece of memory. NULL if out of memory. */
static llmaas_adapter * copy_of(const llmaas_adapter * adapters, uint32_t n_levels) {
    size_t n_bytes = n_levels * sizeof *adapters;
    for (uint32_t level = 0; level < n_levels; level++) {
        n_bytes += a_bytes(&adapters[level]) + b_bytes(&adapters[level]);
    }
    llmaas_adapter * copy = malloc(n_bytes);
    uint8_t *        to   = copy ? (uint8_t *) (copy + n_levels) : NULL;
    for (uint32_t level = 0; copy && level < n_levels; level++) {
        const llmaas_adapter * one = &adapters[level];
        copy[level] = *one;
        if (one->rank > 0) {
            copy[level].a = memcpy(to, one->a, a_bytes(one));
            to += a_bytes(one);
            copy[level].b = memcpy(to, one->b, b_bytes(one));
            to += b_bytes(one);
        }
    }
    return copy;
}

llmaas_status llmaas_weights_claim_adapters(
    llmaas_weights * weights, const char * name, const llmaas_adapter * adapters, uint32_t n_levels) {
    if (!are_sound(adapters, n_levels)) {
        return LLMAAS_EINVAL;
    }
    llmaas_weights_begin_change(weights);
    llmaas_weight *  weight = llmaas_weights_by_name(weights, name);
    const bool       is_new = weight && weight->part && !weight->adapters;
    llmaas_adapter * copy   = is_new ? copy_of(adapters, n_levels) : NULL;
    if (copy) {
        weight->adapters         = copy;
        weight->n_adapter_levels = n_levels;
        llmaas_weights_count_changed(weights, weight);
    }
    llmaas_weights_end_change(weights);
    return copy ? LLMAAS_OK : is_new ? LLMAAS_ESPACE : LLMAAS_EINVAL;
}

const llmaas_adapter * llmaas_weight_adapter(const llmaas_weight * weight, int32_t level) {
    if (!weight->adapters || level < 0) {
        return NULL;
    }
    const uint32_t at = (uint32_t) level < weight->n_adapter_levels ? (uint32_t) level : weight->n_adapter_levels - 1;
    return weight->adapters[at].rank > 0 ? &weight->adapters[at] : NULL;
}

bool llmaas_weight_adapters_fit(const llmaas_weight * weight) {
    bool fit = !weight->adapters || ggml_nrows(weight->tensor) == weight->tensor->ne[1];
    for (uint32_t level = 0; fit && weight->adapters && level < weight->n_adapter_levels; level++) {
        const llmaas_adapter * one = &weight->adapters[level];
        fit = one->rank == 0 || (one->n_columns <= weight->tensor->ne[0] && one->n_rows <= weight->tensor->ne[1]);
    }
    return fit;
}

/* -- products ----------------------------------------------------------------------------------------------------- */

/* The term of one product: the adapter's part within the part of the weight that is used. */
typedef struct term {
    const llmaas_adapter *     adapter;
    const struct ggml_tensor * product;
    uint32_t                   n_columns, n_rows;
} term;

/* Add the rows `first` to `end` of the term to n vectors from `vector` on. */
static void add_to(const term * t, int64_t vector, uint32_t n, uint32_t first, uint32_t end) {
    const uint32_t rank = t->adapter->rank;
    const float *  x[BATCH];
    float *        y[BATCH];
    float          u[BATCH * LLMAAS_MAX_RANK];
    for (uint32_t i = 0; i < n; i++) {
        x[i] = (const float *) (const void *) llmaas_row(t->product->src[1], vector + i);
        y[i] = (float *) (void *) llmaas_row(t->product, vector + i);
    }
    llmaas_low_rank_reduce(t->adapter->a, rank, t->n_columns, x, n, u);
    llmaas_low_rank_expand(t->adapter->b, rank, first, end, u, n, y);
}

static void add_batches(const term * t, int64_t vector, int64_t end, uint32_t first_row, uint32_t end_row) {
    for (; vector < end && first_row < end_row; vector += BATCH) {
        const int64_t n = end - vector < BATCH ? end - vector : BATCH;
        add_to(t, vector, (uint32_t) n, first_row, end_row);
    }
}

/* Threads take vectors each, or rows of every vector if there are fewer vectors than threads. Then each thread computes
 * A x for itself, which takes less time than waiting for another one. */
static void add_term(void * arg, int ith, int nth) {
    const term *  t = arg;
    const int64_t n = ggml_nrows(t->product);
    if (n >= nth) {
        add_batches(t, n * ith / nth, n * (ith + 1) / nth, 0, t->n_rows);
        return;
    }
    const int64_t n_blocks = ((int64_t) t->n_rows + BLOCK - 1) / BLOCK;
    const int64_t first = n_blocks * ith / nth * BLOCK, end = n_blocks * (ith + 1) / nth * BLOCK;
    add_batches(t, 0, n, (uint32_t) first, end < t->n_rows ? (uint32_t) end : t->n_rows);
}

static uint32_t least(uint32_t n, int64_t most) { return n < most ? n : (uint32_t) most; }

void llmaas_weight_adapt(
    const llmaas_weight * weight, int32_t level, llmaas_graph * graph, const struct ggml_tensor * product) {
    const llmaas_adapter * adapter = llmaas_weight_adapter(weight, level);
    if (!adapter) {
        return;
    }
    const struct ggml_tensor * x    = product->src[1];
    const llmaas_extent        part = llmaas_weight_extent(weight, level);
    const term t = {adapter, product, least(adapter->n_columns, part.n_columns), least(adapter->n_rows, part.n_rows)};
    if (x->type != GGML_TYPE_F32 || product->type != GGML_TYPE_F32 || x->nb[0] != sizeof(float)) {
        llmaas_graph_fail(graph); /* llama.cpp multiplies weights with plain F32 rows only */
    } else if (t.n_columns > 0 && t.n_rows > 0) {
        llmaas_graph_step(graph, add_term, &t, sizeof t);
    }
}
