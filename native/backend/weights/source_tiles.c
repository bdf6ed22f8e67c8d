/* Weights cut into tiles of our own, each in ggml-cpu's fastest layout for it.
 *
 * The tiles are cut at the columns that the claimed part asks for. So each of its extents is a number of whole tiles,
 * on every processor; ggml-cpu multiplies tile by tile, and the products are added. Each tile costs its own pass over
 * the activations: a part with few distinct extents is cheap, one with many is not. */
#include "base/cpu.h"
#include "weights/weights.h"

#include <stdlib.h>
#include <string.h>

#define MAX_TILES 16

struct state {
    int                   n_tiles;
    int64_t               columns[MAX_TILES + 1]; /* first column of each tile, and the end of the last */
    struct ggml_tensor    tiles[MAX_TILES];
    ggml_backend_buffer_t buffers[MAX_TILES];
};

static void unload(llmaas_weight * weight) {
    struct state * state = weight->state;
    for (int i = 0; state && i < state->n_tiles; i++) {
        if (state->buffers[i]) {
            ggml_backend_buffer_free(state->buffers[i]);
        }
    }
    free(state);
    weight->state = NULL;
}

/* Insert a cut unless it exists. False if there are too many. */
static bool cut_at(struct state * state, int64_t column) {
    int at = 0;
    while (at <= state->n_tiles && state->columns[at] < column) {
        at++;
    }
    if (state->columns[at] == column) {
        return true;
    }
    if (state->n_tiles == MAX_TILES) {
        return false;
    }
    memmove(state->columns + at + 1, state->columns + at, (size_t) (state->n_tiles + 1 - at) * sizeof *state->columns);
    state->columns[at] = column;
    state->n_tiles++;
    return true;
}

static bool cut(const llmaas_weight * weight, struct state * state) {
    const int64_t n_columns = weight->tensor->ne[0], block = ggml_blck_size(weight->tensor->type);
    state->n_tiles    = 1;
    state->columns[1] = n_columns;
    for (uint32_t level = 0; weight->part == &llmaas_part_columns && level < weight->n_levels; level++) {
        const int64_t extent = weight->extents[level], column = (extent + block - 1) / block * block;
        if (extent > 0 && column < n_columns && !cut_at(state, column)) {
            return false;
        }
    }
    return true;
}

/* Return the first of ggml-cpu's own buffer types that takes the tile, as llama.cpp's loader chooses; else plain
 * memory. */
static ggml_backend_buffer_type_t buffer_type(const struct ggml_tensor * tile) {
    for (ggml_backend_buffer_type_t * type = llmaas_cpu_extra_types(); type && *type; type++) {
        if (llmaas_cpu_multiplies(*type, tile)) {
            return *type;
        }
    }
    return ggml_backend_cpu_buffer_type();
}

static bool allocate(struct state * state, int i) {
    struct ggml_tensor *             tile = &state->tiles[i];
    const ggml_backend_buffer_type_t type = buffer_type(tile);
    state->buffers[i] = ggml_backend_buft_alloc_buffer(type, ggml_backend_buft_get_alloc_size(type, tile));
    if (!state->buffers[i]) {
        return false;
    }
    ggml_backend_buffer_set_usage(state->buffers[i], GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    return ggml_backend_tensor_alloc(state->buffers[i], tile, ggml_backend_buffer_get_base(state->buffers[i])) ==
           GGML_STATUS_SUCCESS;
}

/* Fill tile i from the weight's plain bytes. */
static bool fill(const llmaas_weight * weight, struct state * state, int i, const char * bytes) {
    const struct ggml_tensor * tensor = weight->tensor;
    struct ggml_tensor *       tile   = &state->tiles[i];
    const int64_t              first = state->columns[i], n_columns = state->columns[i + 1] - first;
    *tile = (struct ggml_tensor) {.type = tensor->type, .ne = {n_columns, tensor->ne[1], tensor->ne[2], tensor->ne[3]}};
    tile->nb[0] = ggml_type_size(tensor->type);
    tile->nb[1] = ggml_row_size(tensor->type, n_columns);
    tile->nb[2] = tile->nb[1] * (size_t) tile->ne[1];
    tile->nb[3] = tile->nb[2] * (size_t) tile->ne[2];
    memcpy(tile->name, weight->name, sizeof tile->name);
    const size_t n_bytes = ggml_nbytes(tile);
    char *       plain   = malloc(n_bytes);
    const bool   ok      = plain && allocate(state, i);
    if (ok) {
        const size_t skipped = ggml_row_size(tensor->type, first);
        for (int64_t row = 0; row < ggml_nrows(tensor); row++) {
            memcpy(plain + (size_t) row * tile->nb[1], bytes + (size_t) row * tensor->nb[1] + skipped, tile->nb[1]);
        }
        ggml_backend_tensor_set(tile, plain, 0, n_bytes);
    }
    free(plain);
    return ok;
}

static bool load(llmaas_weight * weight, const void * bytes) {
    struct state * state = calloc(1, sizeof *state);
    weight->state = state;
    bool ok = state && cut(weight, state);
    for (int i = 0; ok && i < state->n_tiles; i++) {
        ok = fill(weight, state, i, bytes);
    }
    if (!ok) {
        unload(weight); /* a partial set of tiles is useless; problem() sees the missing state */
    }
    return ok;
}

static const char * problem(const llmaas_weight * weight) {
    return weight->state ? NULL : "could not be cut into tiles: a weight has at most 16, and memory must hold them";
}

static void round_extents(const llmaas_weight * weight, int64_t * n_rows, int64_t * n_columns) {
    const struct state * state = weight->state;
    for (int i = 1; i <= state->n_tiles; i++) {
        if (state->columns[i] >= *n_columns) {
            *n_columns = state->columns[i];
            break;
        }
    }
    /* Layouts interleave 4, 8 or 16 rows. */
    *n_rows = (*n_rows + 15) / 16 * 16;
}

/* Return the columns of the activations that a tile is multiplied with, made contiguous: repacked kernels assume that
 * they are. */
static struct ggml_tensor * columns_of(llmaas_graph * graph, const struct ggml_tensor * x, int64_t first, int64_t n) {
    struct ggml_tensor * view = llmaas_graph_copy(graph, x);
    if (!view) {
        return NULL;
    }
    view->ne[0] = n;
    view->data  = (char *) x->data + (size_t) first * x->nb[0];
    if (x->ne[1] * x->ne[2] * x->ne[3] == 1) {
        return view;
    }
    void * memory = llmaas_graph_scratch(graph, 0, (size_t) (n * x->ne[1] * x->ne[2] * x->ne[3]) * sizeof(float));
    struct ggml_tensor * copy = memory ? llmaas_graph_tensor(graph, n, x->ne[1], x->ne[2], x->ne[3], memory) : NULL;
    if (copy) {
        copy->op     = llmaas_op_number(LLMAAS_OP_CONT);
        copy->src[0] = view;
        llmaas_graph_append(graph, copy);
    }
    return copy;
}

/* Append sum += product of a tile, which lies in scratch memory. */
static bool add(llmaas_graph * graph, struct ggml_tensor * sum, struct ggml_tensor * product) {
    struct ggml_tensor * added = llmaas_graph_copy(graph, sum);
    if (!added) {
        return false;
    }
    memset(added->op_params, 0, sizeof added->op_params);
    memset(added->src, 0, sizeof added->src);
    added->op     = llmaas_op_number(LLMAAS_OP_ADD);
    added->src[0] = sum;
    added->src[1] = product;
    llmaas_graph_append(graph, added);
    return true;
}

static bool multiply(
    const llmaas_weight * weight, llmaas_graph * graph, struct ggml_tensor * node, int64_t n_rows, int64_t n_columns) {
    struct state *       state = weight->state;
    struct ggml_tensor * sum   = NULL;
    for (int i = 0; i < state->n_tiles && state->columns[i] < n_columns; i++) {
        struct ggml_tensor * product = llmaas_graph_copy(graph, node);
        struct ggml_tensor * tile    = llmaas_graph_copy(graph, &state->tiles[i]);
        if (!product || !tile) {
            return false;
        }
        tile->ne[1] = product->ne[0] = n_rows;
        product->src[0] = tile;
        product->src[1] = columns_of(graph, node->src[1], state->columns[i], tile->ne[0]);
        if (sum) {
            product->data = llmaas_graph_scratch(graph, 1, ggml_nbytes(node));
        }
        if (!product->src[1] || !product->data) {
            return false;
        }
        llmaas_graph_append(graph, product);
        if (sum && !add(graph, sum, product)) {
            return false;
        }
        sum = sum ? sum : product;
    }
    return true;
}

const llmaas_source_ops llmaas_source_tiles = {
    .load = load, .unload = unload, .problem = problem, .round = round_extents, .multiply = multiply};
