#include "weights/pruning.h"

#include "src/grow.h"

#include <stdlib.h>
#include <string.h>

/* -- lookup by tensor ---------------------------------------------------------------------------------------------- */

void llmaas_pruning_free(llmaas_pruning * pruning) {
    free(pruning->all);
    free(pruning->slots);
}

void llmaas_pruning_forget(llmaas_pruning * pruning) {
    if (pruning->n > 0) {
        memset(pruning->slots, 0, pruning->n_slots * sizeof *pruning->slots);
    }
    pruning->n        = 0;
    pruning->n_unread = 0;
}

static bool reserve(llmaas_pruning * pruning, size_t n_nodes) {
    size_t n_slots = 64;
    while (n_slots < 2 * n_nodes) {
        n_slots *= 2;
    }
    if (n_slots > pruning->n_slots) {
        free(pruning->slots);
        pruning->slots   = calloc(n_slots, sizeof *pruning->slots);
        pruning->n_slots = pruning->slots ? n_slots : 0;
    }
    return pruning->slots != NULL;
}

static size_t slot_of(const llmaas_pruning * pruning, const struct ggml_tensor * tensor) {
    size_t slot = ((uintptr_t) tensor >> 4) * 0x9E3779B97F4A7C15u >> 20 & (pruning->n_slots - 1);
    while (pruning->slots[slot] && pruning->all[pruning->slots[slot] - 1].of != tensor) {
        slot = (slot + 1) & (pruning->n_slots - 1);
    }
    return slot;
}

static llmaas_pruned * find(const llmaas_pruning * pruning, const struct ggml_tensor * tensor) {
    if (pruning->n == 0 || !tensor) {
        return NULL;
    }
    const uint32_t number = pruning->slots[slot_of(pruning, tensor)];
    return number ? &pruning->all[number - 1] : NULL;
}

/* Return the number of the tensor that represents the whole joined set. */
static size_t root(const llmaas_pruning * pruning, const llmaas_pruned * pruned) {
    size_t at = pruned->joined;
    while (pruning->all[at].joined != at) {
        at = pruning->all[at].joined;
    }
    return at;
}

llmaas_pruned * llmaas_pruning_of(const llmaas_pruning * pruning, const struct ggml_tensor * tensor) {
    llmaas_pruned * found = find(pruning, tensor);
    return found && !pruning->all[root(pruning, found)].is_void ? found : NULL;
}

static void make_void(llmaas_pruning * pruning, const llmaas_pruned * pruned) {
    pruning->all[root(pruning, pruned)].is_void = true;
}

static void join(llmaas_pruning * pruning, const llmaas_pruned * one, const llmaas_pruned * other) {
    const size_t a = root(pruning, one), b = root(pruning, other);
    pruning->all[a].is_void = pruning->all[a].is_void || pruning->all[b].is_void;
    pruning->all[b].joined  = a;
}

/* -- walking through a graph --------------------------------------------------------------------------------------- */

/* Add a pruned tensor. NULL if out of memory. */
static llmaas_pruned * add(llmaas_pruning * pruning, const struct ggml_cgraph * graph, const llmaas_pruned * pruned) {
    llmaas_pruned * all = llmaas_grown(pruning->all, pruning->n, &pruning->n_capacity, sizeof *all);
    if (!all) {
        return NULL;
    }
    pruning->all = all;
    const size_t slot = slot_of(pruning, pruned->of), number = pruning->n++;
    pruning->slots[slot] = (uint32_t) number + 1;
    all[number]           = *pruned;
    all[number].joined    = number;
    all[number].narrowed  = NULL;
    all[number].n_unread  = llmaas_graph_uses(graph, pruned->of);
    all[number].is_void   = pruned->of->flags & GGML_TENSOR_FLAG_OUTPUT || pruned->of->type != GGML_TYPE_F32;
    pruning->n_unread += all[number].n_unread;
    return &all[number];
}

/* Count the pruned tensors that a node reads as read, and join them. Return the first; NULL if the node reads none. */
static const llmaas_pruned * read_operands(llmaas_pruning * pruning, const struct ggml_tensor * node) {
    const llmaas_pruned * first = NULL;
    for (int i = 0; i < GGML_MAX_SRC && pruning->n_unread > 0; i++) {
        llmaas_pruned * operand = find(pruning, node->src[i]);
        if (operand) {
            operand->n_unread--;
            pruning->n_unread--;
            if (first) {
                join(pruning, first, operand);
            }
            first = first ? first : operand;
        }
    }
    return first;
}

/* Return whether a product's columns all lie within what is computed of its operand. */
static bool is_end(const struct ggml_tensor * node, llmaas_extent part, const llmaas_pruned * operand) {
    return operand->of == node->src[1] && node->src[0] != node->src[1] && operand->axis == 0 &&
           operand->period == node->src[1]->ne[0] && part.n_columns <= operand->n;
}

/* Find what is computed of a node that reads a pruned tensor. False if out of memory. */
static bool follow(
    llmaas_pruning * pruning, const struct ggml_cgraph * graph, const struct ggml_tensor * node,
    const llmaas_pruned * operand) {
    const size_t  number = (size_t) (operand - pruning->all);
    llmaas_pruned to     = {.of = node};
    if (pruning->all[root(pruning, operand)].is_void) {
        return true;
    }
    if (!llmaas_pruned_follow(pruning, node, operand, &to)) {
        make_void(pruning, operand);
        return true;
    }
    const llmaas_pruned * added  = add(pruning, graph, &to);
    if (added) {
        join(pruning, &pruning->all[number], added);
    }
    return added != NULL;
}

/* Visit a product with a claimed weight: it begins the pruning, or ends it. */
static bool visit_product(
    llmaas_pruning * pruning, const struct ggml_cgraph * graph, const struct ggml_tensor * node, llmaas_extent part,
    const llmaas_pruned * operand) {
    if (operand && !is_end(node, part, operand)) {
        make_void(pruning, operand);
    }
    const llmaas_pruned rows = {.of = node, .period = node->ne[0], .n = part.n_rows};
    return part.n_rows == node->ne[0] || add(pruning, graph, &rows);
}

static bool visit(
    llmaas_pruning * pruning, const llmaas_weights * weights, int32_t level, const struct ggml_cgraph * graph,
    const struct ggml_tensor * node) {
    const bool            is_product = llmaas_is_product(node);
    const llmaas_weight * weight     = is_product ? llmaas_weights_find(weights, node->src[0]) : NULL;
    const llmaas_pruned * operand    = read_operands(pruning, node);
    if (weight && weight->is_claimed) {
        return visit_product(pruning, graph, node, llmaas_weight_extent(weight, level), operand);
    }
    return !operand || follow(pruning, graph, node, operand);
}

bool llmaas_pruning_find(
    llmaas_pruning * pruning, const llmaas_weights * weights, int32_t level, const struct ggml_cgraph * graph) {
    llmaas_pruning_forget(pruning);
    if (!reserve(pruning, (size_t) graph->n_nodes)) {
        return false;
    }
    for (int i = 0; i < graph->n_nodes; i++) {
        if (!visit(pruning, weights, level, graph, graph->nodes[i])) {
            return false;
        }
    }
    for (size_t i = 0; i < pruning->n; i++) {
        if (pruning->all[i].n_unread > 0) { /* a later node reads it; perhaps an app looks at this one */
            make_void(pruning, &pruning->all[i]);
        }
    }
    return true;
}

/* -- the rest of tensors that are written to memory ---------------------------------------------------------------- */

struct rest {
    char * data;
    size_t n_periods, n_period, n_kept; /* n_period and n_kept are bytes */
};

static void clear_rest(void * arg, int ith, int nth) {
    const struct rest * rest  = arg;
    const size_t        first = rest->n_periods * (size_t) ith / (size_t) nth;
    const size_t        last  = rest->n_periods * (size_t) (ith + 1) / (size_t) nth;
    for (size_t i = first; i < last; i++) {
        memset(rest->data + i * rest->n_period + rest->n_kept, 0, rest->n_period - rest->n_kept);
    }
}

void llmaas_pruning_clear_rest(
    const llmaas_pruning * pruning, llmaas_graph * graph, const struct ggml_tensor * tensor) {
    const llmaas_pruned * found = find(pruning, tensor);
    if (!found || !found->has_rest || !ggml_is_contiguous(tensor)) {
        return;
    }
    size_t n_each = sizeof(float); /* bytes of a neighbor along the axis */
    for (int i = 0; i < found->axis; i++) {
        n_each *= (size_t) tensor->ne[i];
    }
    const size_t      n_period = n_each * (size_t) found->period;
    const struct rest rest     = {tensor->data, ggml_nbytes(tensor) / n_period, n_period, n_each * (size_t) found->n};
    llmaas_graph_step(graph, clear_rest, &rest, sizeof rest);
}

/* -- narrowed nodes ------------------------------------------------------------------------------------------------ */

static void close_gaps(struct ggml_tensor * tensor) {
    for (int i = 1; i < GGML_MAX_DIMS; i++) {
        tensor->nb[i] = tensor->nb[i - 1] * (size_t) tensor->ne[i - 1];
    }
}

/* Set the strides and, for views, the data pointer, which is another tensor's. */
static void lay_out(struct ggml_tensor * node, const struct ggml_tensor * from) {
    close_gaps(node);
    if (llmaas_op_of(node) == LLMAAS_OP_RESHAPE || llmaas_op_of(node) == LLMAAS_OP_VIEW) {
        node->data = from->data;
    } else if (llmaas_op_of(node) == LLMAAS_OP_PERMUTE) {
        for (int i = 0; i < GGML_MAX_DIMS; i++) {
            node->nb[node->op_params[i]] = from->nb[i];
        }
        node->data = from->data;
    }
}

static struct ggml_tensor * operand(
    const llmaas_pruning * pruning, llmaas_graph * graph, const llmaas_pruned * pruned, int i) {
    struct ggml_tensor *  whole = pruned->of->src[i];
    const llmaas_pruned * found = llmaas_pruning_of(pruning, whole);
    int                   axis;
    const int64_t         n = found || !whole ? 0 : llmaas_pruned_cut(pruned->of, i, pruned, &axis);
    if (n > 0) {
        return llmaas_graph_slice(graph, whole, axis, 0, n);
    }
    return found ? found->narrowed : whole;
}

struct ggml_tensor * llmaas_pruned_make(
    const llmaas_pruning * pruning, llmaas_graph * graph, llmaas_pruned * pruned) {
    struct ggml_tensor * node = llmaas_graph_copy(graph, pruned->of);
    if (!node) {
        return NULL;
    }
    node->ne[pruned->axis] = node->ne[pruned->axis] / pruned->period * pruned->n;
    for (int i = 0; i < GGML_MAX_SRC && pruned->of->src[i]; i++) {
        node->src[i] = operand(pruning, graph, pruned, i);
        if (!node->src[i]) {
            return NULL;
        }
    }
    lay_out(node, node->src[0]);
    pruned->narrowed = node;
    return node;
}
