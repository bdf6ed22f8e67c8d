/* Reading masks: which cells the queries of a graph see. */
#include "attention/mask.h"
#include "attention/narrow.h"

/* llama.cpp's graphs reach a multiple of this many cells, for which all of ggml-cpu's kernels are made. A range starts
 * at the first visible cell. So it equals the range of a graph whose cells begin there, and the result is
 * bit-identical. */
enum { N_STEP = 256 };

static bool is_hidden(const char * row, size_t size, uint64_t word, int64_t column) {
    return memcmp(row + (size_t) column * size, &word, size) == 0;
}

/* Return the first visible column before `end`, or `end`. */
static int64_t first_visible(const char * row, size_t size, uint64_t word, int64_t end) {
    int64_t column = llmaas_mask_skip(row, size, 0, end, word);
    while (column < end && is_hidden(row, size, word, column)) {
        ++column;
    }
    return column;
}

/* Return the column behind the last visible one of n, or `start` if that is larger. */
static int64_t end_visible(const char * row, size_t size, uint64_t word, int64_t start, int64_t n) {
    const int64_t step = (int64_t) (sizeof word / size);
    while (n - step >= start && llmaas_mask_is(row, size, n - step, word)) {
        n -= step;
    }
    while (n > start && is_hidden(row, size, word, n - 1)) {
        --n;
    }
    return n;
}

static int64_t count_hidden(const char * row, size_t size, uint64_t word, int64_t first, int64_t end) {
    int64_t n_hidden = 0;
    for (int64_t column = first; column < end; ++column) {
        n_hidden += is_hidden(row, size, word, column);
    }
    return n_hidden;
}

bool llmaas_mask_is_readable(const struct ggml_tensor * mask) {
    return mask && llmaas_op_of(mask) == LLMAAS_OP_NONE && mask->data && ggml_is_contiguous(mask) &&
           mask->ne[2] * mask->ne[3] == 1 && (mask->type == GGML_TYPE_F16 || mask->type == GGML_TYPE_F32);
}

llmaas_visible llmaas_mask_read(const struct ggml_tensor * mask) {
    const int64_t  n_cells = mask->ne[0];
    const size_t   size    = ggml_type_size(mask->type);
    const uint64_t word    = llmaas_mask_hidden(mask->type);
    const char *   rows    = mask->data;
    int64_t        first   = n_cells, end = 0;
    for (int64_t row = 0; row < mask->ne[1]; ++row) {
        first = first_visible(rows + (size_t) row * mask->nb[1], size, word, first);
        end   = end_visible(rows + (size_t) row * mask->nb[1], size, word, end, n_cells);
    }
    llmaas_visible visible = {.mask = mask, .n = n_cells};
    if (first >= end) {
        return visible; /* a graph without visible cells */
    }
    const int64_t n = (end - first + N_STEP - 1) / N_STEP * N_STEP;
    if (n + N_STEP <= n_cells) {
        visible.first     = first < n_cells - n ? first : n_cells - n;
        visible.n         = n;
        visible.is_narrow = true;
    }
    visible.has_holes = mask->ne[1] == 1 && count_hidden(rows, size, word, first, end) >= N_STEP;
    return visible;
}

/* -- runs of cells ------------------------------------------------------------------------------------------------- */

/* Cells are treated in blocks, so that the kernels get multiples of N_BLOCK. */
enum { N_BLOCK = 64, MAX_BLOCKS = 4096 };

static void mark_visible(const struct ggml_tensor * mask, bool * is_visible) {
    const size_t size = ggml_type_size(mask->type);
    for (int64_t row = 0; row < mask->ne[1]; ++row) {
        const char * from = (const char *) mask->data + (size_t) row * mask->nb[1];
        for (int64_t i = 0; i < mask->ne[0] / N_BLOCK; ++i) {
            const char * block = from + (size_t) (i * N_BLOCK) * size;
            is_visible[i] = is_visible[i] || first_visible(block, size, llmaas_mask_hidden(mask->type), N_BLOCK) < N_BLOCK;
        }
    }
}

/* Make runs of the visible blocks; join those with a gap of less than N_STEP cells between them. */
static void join_blocks(const bool * is_visible, int64_t n_blocks, llmaas_visible * visible) {
    int64_t end = -N_STEP;
    for (int64_t i = 0; i < n_blocks; ++i) {
        if (!is_visible[i]) {
            continue;
        }
        if (visible->n_runs == 0 || (i * N_BLOCK - end >= N_STEP && visible->n_runs < LLMAAS_MAX_RUNS)) {
            visible->runs[visible->n_runs++].first = i * N_BLOCK;
        }
        end = (i + 1) * N_BLOCK;
        visible->runs[visible->n_runs - 1].n = end - visible->runs[visible->n_runs - 1].first;
    }
}

void llmaas_mask_find_runs(llmaas_visible * visible) {
    bool          is_visible[MAX_BLOCKS] = {false};
    const int64_t n_blocks            = visible->mask->ne[0] / N_BLOCK;
    if (visible->mask->ne[0] % N_BLOCK != 0 || n_blocks > MAX_BLOCKS) {
        return;
    }
    mark_visible(visible->mask, is_visible);
    join_blocks(is_visible, n_blocks, visible);
    int64_t n_cells = 0;
    for (int i = 0; i < visible->n_runs; ++i) {
        n_cells += visible->runs[i].n;
    }
    if (n_cells == 0 || n_cells + N_STEP > visible->n) {
        visible->n_runs = 0;
    }
}
