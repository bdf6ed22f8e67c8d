/* ggml-cpu walks every cell that a graph reaches. With flash attention, a hidden cell costs little. But ggml-cpu
 * divides the cells of a single query evenly among its threads, so a thread with mostly hidden cells leaves the work to
 * the others. Without flash attention, a hidden cell costs as much as any other. */
#include "attention/narrow.h"

#include <string.h>

/* -- masks --------------------------------------------------------------------------------------------------------- */

static const llmaas_visible * visible_to(const llmaas_narrow * narrow, const struct ggml_tensor * mask) {
    for (int i = 0; i < narrow->n_visible; ++i) {
        if (narrow->visible[i].mask == mask) {
            return &narrow->visible[i];
        }
    }
    return NULL;
}

static const struct ggml_tensor * mask_of(const struct ggml_tensor * node) {
    switch (llmaas_op_of(node)) {
        case LLMAAS_OP_FLASH_ATTN_EXT:
            return node->src[3];
        case LLMAAS_OP_SOFT_MAX:
            return node->src[1];
        default:
            return NULL;
    }
}

void llmaas_narrow_forget(llmaas_narrow * narrow) { narrow->n_visible = 0; }

bool llmaas_narrow_read(llmaas_narrow * narrow, const struct ggml_cgraph * graph) {
    bool is_any = false;
    llmaas_narrow_forget(narrow);
    for (int i = 0; i < graph->n_nodes && narrow->n_visible < LLMAAS_MAX_MASKS; ++i) {
        const struct ggml_tensor * mask = mask_of(graph->nodes[i]);
        if (llmaas_mask_is_readable(mask) && !visible_to(narrow, mask)) {
            llmaas_visible visible = llmaas_mask_read(mask);
            if (llmaas_op_of(graph->nodes[i]) == LLMAAS_OP_SOFT_MAX) {
                llmaas_mask_find_runs(&visible);
            }
            is_any = is_any || visible.is_narrow || visible.has_holes || visible.n_runs > 0;
            narrow->visible[narrow->n_visible++] = visible;
        }
    }
    return is_any;
}

/* -- nodes --------------------------------------------------------------------------------------------------------- */

static struct ggml_tensor * cut(
    llmaas_graph * graph, const struct ggml_tensor * tensor, int axis, const llmaas_visible * visible) {
    return llmaas_graph_slice(graph, tensor, axis, visible->first, visible->n);
}

/* Copy the scores or probabilities, shortened to the range; they use the memory of those of all cells. */
static struct ggml_tensor * shortened(
    llmaas_graph * graph, const struct ggml_tensor * tensor, const llmaas_visible * visible) {
    struct ggml_tensor * part = llmaas_graph_copy(graph, tensor);
    if (part) {
        part->ne[0] = visible->n;
        for (int i = 1; i < GGML_MAX_DIMS; ++i) {
            part->nb[i] = part->nb[i - 1] * (size_t) part->ne[i - 1];
        }
    }
    return part;
}

/* When a query has more than one stream, ggml-cpu deals out heads instead of cells; so make each head a stream. This is
 * wrong with sinks and slopes, which ggml-cpu looks up by head. */
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
    const llmaas_visible * visible = visible_to(narrow, node->src[3]);
    if (!visible || visible->mask->ne[0] != node->src[1]->ne[1]) {
        return NULL;
    }
    const bool are_heads_dealt = visible->has_holes && can_deal_heads(node);
    if (!visible->is_narrow && !are_heads_dealt) {
        return NULL;
    }
    struct ggml_tensor * part = llmaas_graph_copy(graph, node);
    if (!part) {
        return NULL;
    }
    part->src[1] = cut(graph, node->src[1], 1, visible);
    part->src[2] = cut(graph, node->src[2], 1, visible);
    part->src[3] = cut(graph, node->src[3], 0, visible);
    if (!part->src[1] || !part->src[2] || !part->src[3]) {
        return NULL;
    }
    if (are_heads_dealt) {
        deal_heads(graph, part);
    }
    return part;
}

/* Recognize attention by the name that llama.cpp gives to probabilities, which only the next node reads. */
static bool is_attention(
    const struct ggml_tensor * scores, const struct ggml_tensor * probabilities, const struct ggml_tensor * result) {
    return llmaas_op_of(scores) == LLMAAS_OP_MUL_MAT && llmaas_op_of(probabilities) == LLMAAS_OP_SOFT_MAX &&
           llmaas_op_of(result) == LLMAAS_OP_MUL_MAT && probabilities->src[0] == scores && result->src[1] == probabilities &&
           strncmp(probabilities->name, "kq_soft_max", 11) == 0 &&
           !((scores->flags | probabilities->flags) & GGML_TENSOR_FLAG_OUTPUT) &&
           ggml_is_contiguous(scores) && ggml_is_contiguous(probabilities) && ggml_blck_size(result->src[0]->type) == 1;
}

const llmaas_visible * llmaas_narrow_attention(
    const llmaas_narrow * narrow, const struct ggml_cgraph * original, int i) {
    if (i + 2 >= original->n_nodes || llmaas_op_of(original->nodes[i + 1]) != LLMAAS_OP_SOFT_MAX) {
        return NULL;
    }
    const struct ggml_tensor * scores = original->nodes[i];
    const llmaas_visible *        visible   = visible_to(narrow, original->nodes[i + 1]->src[1]);
    const bool is_fit = visible && (visible->is_narrow || visible->n_runs > 0) && visible->mask->ne[0] == scores->ne[0];
    return is_fit && is_attention(scores, original->nodes[i + 1], original->nodes[i + 2]) ? visible : NULL;
}

bool llmaas_narrow_products(
    const llmaas_visible * visible, llmaas_graph * graph, struct ggml_tensor * const * from, llmaas_narrow_nodes * nodes) {
    *nodes = (llmaas_narrow_nodes) {
        .scores        = shortened(graph, from[0], visible),
        .probabilities = shortened(graph, from[1], visible),
        .result        = llmaas_graph_copy(graph, from[2]),
    };
    struct ggml_tensor * keys   = cut(graph, from[0]->src[0], 1, visible);
    struct ggml_tensor * mask   = cut(graph, visible->mask, 0, visible);
    struct ggml_tensor * values = cut(graph, from[2]->src[0], 0, visible);
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
