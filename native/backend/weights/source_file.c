/* Weights in a file. Memory keeps as many of their pieces as it may; the others are read for each graph (stream.h). */
#include "llmaas/sparse.h"
#include "stream/stream.h"
#include "weights/repack.h"
#include "weights/repacked.h"
#include "weights/weights.h"

#include <stdlib.h>
#include <string.h>

enum {
    STEP        = 16,      /* most rows that ggml-cpu interleaves */
};

struct state {
    llmaas_stream * stream;
    llmaas_pieces * file_pieces; /* of the stream */
    int             fd;
    uint64_t        offset;
    bool            is_packed;
    struct ggml_tensor as; /* the weight as products read its bytes: its buffer and extra */
    int64_t         n_rows; /* rows of a piece; the last may have fewer */
    size_t          n_pieces;
    llmaas_piece ** pieces; /* NULL: not loaded, out of memory, or there is a stack */
    llmaas_stack *  stack;  /* the weight's experts, if they can be read one by one; else NULL */
    llmaas_columns  columns; /* for products with one token; without an operand: none */
    uint16_t *      scales; /* of the columns; then the mins, if any */
};

void * llmaas_file_state(llmaas_stream * stream, int fd, uint64_t offset, bool is_packed) {
    struct state * state = calloc(1, sizeof *state);
    if (state) {
        *state = (struct state) {
            .stream = stream, .file_pieces = llmaas_stream_pieces(stream), .fd = fd, .offset = offset,
            .is_packed = is_packed};
    }
    return state;
}

/* Return the rows of a piece. A stack of matrices (experts) is not cut. */
static int64_t rows_of_piece(const struct ggml_tensor * tensor) {
    const int64_t n_rows = LLMAAS_PIECE_BYTES / (int64_t) tensor->nb[1] / STEP * STEP;
    if (ggml_nrows(tensor) > tensor->ne[1] || n_rows >= tensor->ne[1]) {
        return tensor->ne[1];
    }
    return n_rows > STEP ? n_rows : STEP;
}

static llmaas_stack * make_stack(const struct state * state, const struct ggml_tensor * tensor) {
    llmaas_experts * experts = tensor->ne[2] > 1 ? llmaas_stream_experts(state->stream) : NULL;
    return experts ? llmaas_experts_add(experts, state->fd, state->offset, tensor->nb[2], (int32_t) tensor->ne[2]) : NULL;
}

static bool make_pieces(struct state * state, const struct ggml_tensor * tensor) {
    state->n_rows   = rows_of_piece(tensor);
    state->n_pieces = (size_t) ((tensor->ne[1] + state->n_rows - 1) / state->n_rows);
    state->pieces   = calloc(state->n_pieces, sizeof *state->pieces);
    bool ok         = state->pieces != NULL;
    for (size_t i = 0; ok && i < state->n_pieces; i++) {
        const size_t begin = i * (size_t) state->n_rows * tensor->nb[1], end = begin + (size_t) state->n_rows * tensor->nb[1];
        const size_t n_bytes = ggml_nbytes(tensor);
        state->pieces[i] = llmaas_pieces_add(state->file_pieces, &(llmaas_piece) {
            .fd      = state->fd,
            .offset  = state->offset + begin,
            .n_bytes = (i + 1 == state->n_pieces ? n_bytes : end) - begin,
            .home    = (char *) tensor->data + begin});
        ok = state->pieces[i] != NULL;
    }
    return ok;
}

/* Drop the bytes: the file has them. */
static bool load(llmaas_weight * weight, const void * bytes) {
    struct state * state = weight->state;
    (void) bytes;
    state->as        = *weight->tensor;
    state->as.buffer = NULL; /* ggml-cpu treats it as plain memory */
    state->as.extra  = NULL;
    state->is_packed = state->is_packed && llmaas_repack_mark(&state->as);
    state->stack     = make_stack(state, weight->tensor);
    return state->stack || make_pieces(state, weight->tensor);
}

static void unload(llmaas_weight * weight) {
    struct state * state = weight->state;
    free(state->pieces);
    free(state->scales);
    free(state);
    weight->state = NULL;
}

llmaas_status llmaas_file_columns(llmaas_weight * weight, const llmaas_columns * columns) {
    struct state *             state  = weight->state;
    const struct ggml_tensor * tensor = weight->tensor;
    const size_t               width  = llmaas_operand_width(columns->operand), n_rows = columns->n_scales;
    if (state->stack || state->columns.operand || ggml_nrows(tensor) != tensor->ne[1] || (size_t) tensor->ne[0] != width ||
        n_rows % LLMAAS_CHUNK_ROWS != 0 || n_rows < (size_t) tensor->ne[1] || (columns->n_bits != 4 && (columns->n_bits != 8 || columns->mins))) {
        return LLMAAS_EINVAL;
    }
    const size_t n = width / LLMAAS_BLOCK_COLUMNS * n_rows, n_bytes = n * sizeof *state->scales;
    state->scales  = malloc(columns->mins ? 2 * n_bytes : n_bytes);
    if (!state->scales) {
        return LLMAAS_ESPACE;
    }
    memcpy(state->scales, columns->scales, n_bytes);
    state->columns        = *columns;
    state->columns.scales = state->scales;
    if (columns->mins) {
        state->columns.mins = memcpy(state->scales + n, columns->mins, n_bytes);
    }
    return LLMAAS_OK;
}

void llmaas_file_spare(llmaas_weight * weight) {
    struct state * state = weight->state;
    for (size_t i = 0; i < state->n_pieces; i++) {
        llmaas_stream_spare(state->stream, state->pieces[i]);
    }
}

static const char * problem(const llmaas_weight * weight) {
    const struct state * state = weight->state;
    if (!state->stack && (!state->pieces || !state->pieces[state->n_pieces - 1])) {
        return "could not be cut into pieces: out of memory";
    }
    if (state->is_packed && weight->part == &llmaas_part_columns && !llmaas_repacked_columns_supported(&state->as)) {
        return "is repacked in its file in a way whose columns cannot be cut on this processor; claim it in the model file";
    }
    return NULL;
}

static void round_extents(const llmaas_weight * weight, int64_t * n_rows, int64_t * n_columns) {
    const struct state * state = weight->state;
    const int64_t        block = ggml_blck_size(weight->tensor->type);
    *n_columns = (*n_columns + block - 1) / block * block;
    *n_rows    = state->is_packed ? (*n_rows + STEP - 1) / STEP * STEP : *n_rows;
}

/* Append a product. A step before it sets where the weight is. */
static bool append(const struct state * state, llmaas_graph * graph, struct ggml_tensor * product) {
    const struct ggml_tensor * weight = product->src[0];
    if (state->is_packed && weight->ne[0] < state->as.ne[0]) {
        return llmaas_repacked_columns(graph, weight, product, weight->ne[1], weight->ne[0]);
    }
    llmaas_graph_append(graph, product);
    return true;
}

static bool multiply_experts(
    const struct state * state, llmaas_graph * graph, struct ggml_tensor * node, int64_t n_rows, int64_t n_columns) {
    struct ggml_tensor * product = llmaas_product_of(graph, &state->as, node, 0, n_rows, n_columns);
    return product && llmaas_experts_use(llmaas_stream_experts(state->stream), state->stack, product) &&
           append(state, graph, product);
}

/* Return the bytes that n rows of a piece use; for a stack of matrices, all bytes. */
static llmaas_strided used_of(const struct state * state, int64_t n_rows, int64_t n_columns) {
    int64_t row_step, column_step;
    llmaas_weight_steps(&state->as, &row_step, &column_step);
    const size_t n_all = ggml_nbytes(&state->as), stride = (size_t) row_step * state->as.nb[1];
    if (ggml_nrows(&state->as) > state->as.ne[1]) {
        return (llmaas_strided) {n_all, n_all, n_all};
    }
    return (llmaas_strided) {
        (size_t) n_rows * state->as.nb[1], stride, (size_t) row_step * ggml_row_size(state->as.type, n_columns)};
}

/* Return the bytes that n rows use of piece i, which may be fewer than its own; n_bytes 0: none. */
static llmaas_strided used_of_piece(const struct state * state, size_t i, int64_t n_rows, int64_t n_columns) {
    const int64_t n_left = n_rows - (int64_t) i * state->n_rows;
    return used_of(state, n_left <= 0 ? 0 : n_left < state->n_rows ? n_left : state->n_rows, n_columns);
}

static bool has_piece(const struct state * state, size_t i, int64_t n_rows, int64_t n_columns) {
    const llmaas_strided used = used_of_piece(state, i, n_rows, n_columns);
    return llmaas_piece_has(state->pieces[i], &used);
}

void llmaas_file_keep_first(llmaas_weight * weight, int64_t n_rows, int64_t n_columns) {
    const struct state * state = weight->state;
    for (size_t i = 0; state->pieces && i < state->n_pieces; i++) {
        const llmaas_strided first = used_of_piece(state, i, n_rows, n_columns);
        llmaas_stream_keep_first(state->stream, state->pieces[i], &first);
    }
}

/* Multiply with rows of one piece that is read, or of one or several that memory holds. */
static bool multiply_rows(
    const struct state * state, llmaas_graph * graph, struct ggml_tensor * node, llmaas_piece * const * pieces, int64_t first,
    int64_t n, int64_t n_columns, bool is_held) {
    struct ggml_tensor * product = llmaas_product_of(graph, &state->as, node, first, n, n_columns);
    if (!product) {
        return false;
    }
    product->src[0]->data = pieces[0]->home;
    if (is_held && !llmaas_piece_is_in_place(pieces[0])) {
        int64_t row_step, column_step;
        llmaas_weight_steps(&state->as, &row_step, &column_step);
        product->src[0]->nb[1] = pieces[0]->first.width / (size_t) row_step;
    }
    for (int64_t i = 0; is_held && i * state->n_rows < n; i++) {
        const int64_t       n_left = n - i * state->n_rows;
        const llmaas_strided used = used_of(state, n_left < state->n_rows ? n_left : state->n_rows, n_columns);
        llmaas_pieces_note(state->file_pieces, pieces[i], &used);
    }
    const llmaas_strided used = used_of(state, n, n_columns);
    if (!is_held && !llmaas_pieces_use(state->file_pieces, pieces[0], &used, product->src[0], 0)) {
        return false;
    }
    return append(state, graph, product);
}

/* Multiply with all pieces; adjacent pieces that memory holds are multiplied together. */
static bool multiply(
    const llmaas_weight * weight, llmaas_graph * graph, struct ggml_tensor * node, int64_t n_rows, int64_t n_columns) {
    const struct state * state = weight->state;
    if (state->stack) {
        return llmaas_op_of(node) == LLMAAS_OP_MUL_MAT_ID && multiply_experts(state, graph, node, n_rows, n_columns);
    }
    if (llmaas_graph_is_sparse(graph) && state->columns.operand && n_rows == state->as.ne[1] && n_columns == state->as.ne[0] && llmaas_columns_fit(node)) {
        return llmaas_columns_multiply(&state->columns, graph, node);
    }
    for (int64_t first = 0; first < n_rows;) {
        const size_t begin   = (size_t) (first / state->n_rows);
        const bool   is_held = has_piece(state, begin, n_rows, n_columns);
        size_t       i       = begin;
        while (is_held && llmaas_piece_is_in_place(state->pieces[i]) && i + 1 < state->n_pieces &&
               llmaas_piece_is_in_place(state->pieces[i + 1]) && has_piece(state, i + 1, n_rows, n_columns)) {
            i++;
        }
        const int64_t end = ((int64_t) i + 1) * state->n_rows < n_rows ? ((int64_t) i + 1) * state->n_rows : n_rows;
        if (!multiply_rows(state, graph, node, state->pieces + begin, first, end - first, n_columns, is_held)) {
            return false;
        }
        first = end;
    }
    return true;
}

const llmaas_source_ops llmaas_source_file = {
    .load = load, .unload = unload, .problem = problem, .round = round_extents, .multiply = multiply};
