/* ggml-cpu walks every cell that a graph reaches. Hidden ones cost little each with flash attention, but it deals the
 * cells of a single query out to its threads in equal numbers, so a thread that gets hidden ones leaves the work to the
 * others. Without flash attention a hidden cell costs as much as any. */
#include "narrow.h"

#include <string.h>

/* llama.cpp's graphs reach a multiple of these, for which all of ggml-cpu's kernels are made. As ranges start at the
 * first cell that is seen, they are what a graph has whose cells begin there: so is the result, bit for bit. */
enum { N_STEP = 256 };

/* -- masks --------------------------------------------------------------------------------------------------------- */

static uint64_t hidden_word(enum ggml_type type) {
    return type == GGML_TYPE_F16 ? 0xfc00fc00fc00fc00ull : 0xff800000ff800000ull; /* minus infinities */
}

static bool is_hidden(const char * row, size_t size, uint64_t word, int64_t column) {
    return memcmp(row + (size_t) column * size, &word, size) == 0;
}

static bool is_word(const char * row, size_t size, uint64_t word, int64_t column) {
    return memcmp(row + (size_t) column * size, &word, sizeof word) == 0;
}

/* The first column before `end` that is seen, or `end`. */
static int64_t first_seen(const char * row, size_t size, uint64_t word, int64_t end) {
    const int64_t step   = (int64_t) (sizeof word / size);
    int64_t       column = 0;
    while (column + step <= end && is_word(row, size, word, column)) {
        column += step;
    }
    while (column < end && is_hidden(row, size, word, column)) {
        ++column;
    }
    return column;
}

/* Behind the last of n columns that is seen, if that is more than `start`; otherwise `start`. */
static int64_t end_seen(const char * row, size_t size, uint64_t word, int64_t start, int64_t n) {
    const int64_t step = (int64_t) (sizeof word / size);
    while (n - step >= start && is_word(row, size, word, n - step)) {
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

/* Whether the values are there before the graph is computed, and one mask is for all heads and streams. */
static bool is_readable(const struct ggml_tensor * mask) {
    return mask && mask->op == GGML_OP_NONE && mask->data && ggml_is_contiguous(mask) &&
           mask->ne[2] * mask->ne[3] == 1 && (mask->type == GGML_TYPE_F16 || mask->type == GGML_TYPE_F32);
}

static llmaas_seen read_mask(const struct ggml_tensor * mask) {
    const int64_t  n_cells = mask->ne[0];
    const size_t   size    = ggml_type_size(mask->type);
    const uint64_t word    = hidden_word(mask->type);
    const char *   rows    = mask->data;
    int64_t        first   = n_cells, end = 0;
    for (int64_t row = 0; row < mask->ne[1]; ++row) {
        first = first_seen(rows + (size_t) row * mask->nb[1], size, word, first);
        end   = end_seen(rows + (size_t) row * mask->nb[1], size, word, end, n_cells);
    }
    llmaas_seen seen = {.mask = mask, .n = n_cells};
    if (first >= end) {
        return seen; /* a graph of no use */
    }
    const int64_t n = (end - first + N_STEP - 1) / N_STEP * N_STEP;
    if (n + N_STEP <= n_cells) {
        seen.first     = first < n_cells - n ? first : n_cells - n;
        seen.n         = n;
        seen.is_narrow = true;
    }
    seen.has_holes = mask->ne[1] == 1 && count_hidden(rows, size, word, first, end) >= N_STEP;
    return seen;
}

static const llmaas_seen * seen_by(const llmaas_narrow * narrow, const struct ggml_tensor * mask) {
    for (int i = 0; i < narrow->n_seen; ++i) {
        if (narrow->seen[i].mask == mask) {
            return &narrow->seen[i];
        }
    }
    return NULL;
}

static const struct ggml_tensor * mask_of(const struct ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_FLASH_ATTN_EXT:
            return node->src[3];
        case GGML_OP_SOFT_MAX:
            return node->src[1];
        default:
            return NULL;
    }
}

void llmaas_narrow_forget(llmaas_narrow * narrow) { narrow->n_seen = 0; }

bool llmaas_narrow_read(llmaas_narrow * narrow, const struct ggml_cgraph * graph) {
    bool is_any = false;
    llmaas_narrow_forget(narrow);
    for (int i = 0; i < graph->n_nodes && narrow->n_seen < LLMAAS_MAX_MASKS; ++i) {
        const struct ggml_tensor * mask = mask_of(graph->nodes[i]);
        if (is_readable(mask) && !seen_by(narrow, mask)) {
            const llmaas_seen seen = read_mask(mask);
            is_any                 = is_any || seen.is_narrow || seen.has_holes;
            narrow->seen[narrow->n_seen++] = seen;
        }
    }
    return is_any;
}

/* -- nodes --------------------------------------------------------------------------------------------------------- */

/* The range of cells of an operand that has cells along `axis`. */
static struct ggml_tensor * cut(
    llmaas_graph * graph, const struct ggml_tensor * tensor, int axis, const llmaas_seen * seen) {
    struct ggml_tensor * part = llmaas_graph_copy(graph, tensor);
    if (part) {
        part->data = (char *) part->data + (size_t) seen->first * part->nb[axis];
        part->ne[axis] = seen->n;
    }
    return part;
}

/* Scores or probabilities of the range, in the memory of those of all cells. */
static struct ggml_tensor * shortened(
    llmaas_graph * graph, const struct ggml_tensor * tensor, const llmaas_seen * seen) {
    struct ggml_tensor * part = llmaas_graph_copy(graph, tensor);
    if (part) {
        part->ne[0] = seen->n;
        for (int i = 1; i < GGML_MAX_DIMS; ++i) {
            part->nb[i] = part->nb[i - 1] * (size_t) part->ne[i - 1];
        }
    }
    return part;
}

/* ggml-cpu deals out heads instead of cells when a query has more than one stream, and this makes each head one. Not with
 * what it looks up by head: sinks and slopes. */
static bool can_deal_heads(const struct ggml_tensor * node) {
    float max_bias;
    memcpy(&max_bias, (const char *) node->op_params + sizeof(float), sizeof max_bias);
    const struct ggml_tensor * query = node->src[0];
    return query->ne[1] == 1 && query->ne[2] > 1 && query->ne[3] == 1 && !node->src[4] && max_bias == 0.0f;
}

static void make_heads_streams(struct ggml_tensor * operand) {
    operand->ne[3] = operand->ne[2];
    operand->nb[3] = operand->nb[2];
    operand->ne[2] = 1;
}

static void deal_heads(llmaas_graph * graph, struct ggml_tensor * node) {
    struct ggml_tensor * query = llmaas_graph_copy(graph, node->src[0]);
    if (query) {
        make_heads_streams(query);
        make_heads_streams(node->src[1]);
        make_heads_streams(node->src[2]);
        node->src[0] = query;
        node->ne[3]  = node->ne[1]; /* [d, n_head, 1, 1] becomes [d, 1, 1, n_head] */
        node->ne[1]  = 1;
        node->nb[2] = node->nb[3] = node->nb[1];
    }
}

struct ggml_tensor * llmaas_narrow_flash(
    const llmaas_narrow * narrow, llmaas_graph * graph, const struct ggml_tensor * node) {
    const llmaas_seen * seen = seen_by(narrow, node->src[3]);
    if (!seen || seen->mask->ne[0] != node->src[1]->ne[1]) {
        return NULL;
    }
    const bool are_heads_dealt = seen->has_holes && can_deal_heads(node);
    if (!seen->is_narrow && !are_heads_dealt) {
        return NULL;
    }
    struct ggml_tensor * part = llmaas_graph_copy(graph, node);
    if (!part) {
        return NULL;
    }
    part->src[1] = cut(graph, node->src[1], 1, seen);
    part->src[2] = cut(graph, node->src[2], 1, seen);
    part->src[3] = cut(graph, node->src[3], 0, seen);
    if (!part->src[1] || !part->src[2] || !part->src[3]) {
        return NULL;
    }
    if (are_heads_dealt) {
        deal_heads(graph, part);
    }
    return part;
}

/* llama.cpp's names for what nobody but the next node reads. */
static bool is_attention(
    const struct ggml_tensor * scores, const struct ggml_tensor * probabilities, const struct ggml_tensor * result) {
    return scores->op == GGML_OP_MUL_MAT && probabilities->op == GGML_OP_SOFT_MAX && result->op == GGML_OP_MUL_MAT &&
           probabilities->src[0] == scores && result->src[1] == probabilities &&
           strncmp(probabilities->name, "kq_soft_max", 11) == 0 &&
           !((scores->flags | probabilities->flags) & GGML_TENSOR_FLAG_OUTPUT) &&
           ggml_is_contiguous(scores) && ggml_is_contiguous(probabilities) && ggml_blck_size(result->src[0]->type) == 1;
}

bool llmaas_narrow_products(const llmaas_narrow * narrow, llmaas_graph * graph, const struct ggml_cgraph * original,
                            int i, llmaas_narrow_nodes * nodes) {
    if (i + 2 >= original->n_nodes || original->nodes[i + 1]->op != GGML_OP_SOFT_MAX) {
        return false;
    }
    const struct ggml_tensor * scores        = original->nodes[i];
    const struct ggml_tensor * probabilities = original->nodes[i + 1];
    const struct ggml_tensor * result        = original->nodes[i + 2];
    const llmaas_seen *        seen          = seen_by(narrow, probabilities->src[1]);
    if (!seen || !seen->is_narrow || seen->mask->ne[0] != scores->ne[0] ||
        !is_attention(scores, probabilities, result)) {
        return false;
    }
    *nodes = (llmaas_narrow_nodes) {
        .scores        = shortened(graph, scores, seen),
        .probabilities = shortened(graph, probabilities, seen),
        .result        = llmaas_graph_copy(graph, result),
        .first         = seen->first,
    };
    struct ggml_tensor * keys   = cut(graph, scores->src[0], 1, seen);
    struct ggml_tensor * mask   = cut(graph, seen->mask, 0, seen);
    struct ggml_tensor * values = cut(graph, result->src[0], 0, seen);
    if (!nodes->scores || !nodes->probabilities || !nodes->result || !keys || !mask || !values) {
        return false;
    }
    nodes->scores->src[0]        = keys;
    nodes->probabilities->src[0] = nodes->scores;
    nodes->probabilities->src[1] = mask;
    nodes->result->src[0]        = values;
    nodes->result->src[1]        = nodes->probabilities;
    return true;
}
