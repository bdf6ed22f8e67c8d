#include "prefix.h"

#include "../src/grow.h"
#include "narrow.h"

#include <stdlib.h>
#include <string.h>

/* -- lookup by tensor ---------------------------------------------------------------------------------------------- */

void llmaas_prefixes_free(llmaas_prefixes * prefixes) {
    free(prefixes->all);
    free(prefixes->slots);
}

void llmaas_prefixes_forget(llmaas_prefixes * prefixes) {
    if (prefixes->n > 0) {
        memset(prefixes->slots, 0, prefixes->n_slots * sizeof *prefixes->slots);
    }
    prefixes->n        = 0;
    prefixes->n_unread = 0;
}

static bool reserve(llmaas_prefixes * prefixes, size_t n_nodes) {
    size_t n_slots = 64;
    while (n_slots < 2 * n_nodes) {
        n_slots *= 2;
    }
    if (n_slots > prefixes->n_slots) {
        free(prefixes->slots);
        prefixes->slots   = calloc(n_slots, sizeof *prefixes->slots);
        prefixes->n_slots = prefixes->slots ? n_slots : 0;
    }
    return prefixes->slots != NULL;
}

static size_t slot_of(const llmaas_prefixes * prefixes, const struct ggml_tensor * tensor) {
    size_t slot = ((uintptr_t) tensor >> 4) * 0x9E3779B97F4A7C15u >> 20 & (prefixes->n_slots - 1);
    while (prefixes->slots[slot] && prefixes->all[prefixes->slots[slot] - 1].of != tensor) {
        slot = (slot + 1) & (prefixes->n_slots - 1);
    }
    return slot;
}

static llmaas_prefix * find(const llmaas_prefixes * prefixes, const struct ggml_tensor * tensor) {
    if (prefixes->n == 0 || !tensor) {
        return NULL;
    }
    const uint32_t number = prefixes->slots[slot_of(prefixes, tensor)];
    return number ? &prefixes->all[number - 1] : NULL;
}

/* Return the number of the prefix that represents the whole joined set. */
static size_t root(const llmaas_prefixes * prefixes, const llmaas_prefix * prefix) {
    size_t at = prefix->joined;
    while (prefixes->all[at].joined != at) {
        at = prefixes->all[at].joined;
    }
    return at;
}

llmaas_prefix * llmaas_prefixes_of(const llmaas_prefixes * prefixes, const struct ggml_tensor * tensor) {
    llmaas_prefix * found = find(prefixes, tensor);
    return found && !prefixes->all[root(prefixes, found)].is_void ? found : NULL;
}

static void make_void(llmaas_prefixes * prefixes, const llmaas_prefix * prefix) {
    prefixes->all[root(prefixes, prefix)].is_void = true;
}

static void join(llmaas_prefixes * prefixes, const llmaas_prefix * one, const llmaas_prefix * other) {
    const size_t a = root(prefixes, one), b = root(prefixes, other);
    prefixes->all[a].is_void = prefixes->all[a].is_void || prefixes->all[b].is_void;
    prefixes->all[b].joined  = a;
}

/* -- walking through a graph --------------------------------------------------------------------------------------- */

/* Add a prefix. NULL if out of memory. */
static llmaas_prefix * add(llmaas_prefixes * prefixes, const struct ggml_cgraph * graph, const llmaas_prefix * prefix) {
    llmaas_prefix * all = llmaas_grown(prefixes->all, prefixes->n, &prefixes->n_capacity, sizeof *all);
    if (!all) {
        return NULL;
    }
    prefixes->all = all;
    const size_t slot = slot_of(prefixes, prefix->of), number = prefixes->n++;
    prefixes->slots[slot] = (uint32_t) number + 1;
    all[number]           = *prefix;
    all[number].joined    = number;
    all[number].narrowed  = NULL;
    all[number].n_unread  = llmaas_graph_uses(graph, prefix->of);
    all[number].is_void   = prefix->of->flags & GGML_TENSOR_FLAG_OUTPUT || prefix->of->type != GGML_TYPE_F32;
    prefixes->n_unread += all[number].n_unread;
    return &all[number];
}

/* Count the prefixes that a node reads as read, and join them. Return the first; NULL if the node reads none. */
static const llmaas_prefix * read_operands(llmaas_prefixes * prefixes, const struct ggml_tensor * node) {
    const llmaas_prefix * first = NULL;
    for (int i = 0; i < GGML_MAX_SRC && prefixes->n_unread > 0; i++) {
        llmaas_prefix * operand = find(prefixes, node->src[i]);
        if (operand) {
            operand->n_unread--;
            prefixes->n_unread--;
            if (first) {
                join(prefixes, first, operand);
            }
            first = first ? first : operand;
        }
    }
    return first;
}

/* Return whether a product's columns all lie within its operand's prefix. */
static bool is_end(const struct ggml_tensor * node, llmaas_extent part, const llmaas_prefix * operand) {
    return operand->of == node->src[1] && node->src[0] != node->src[1] && operand->axis == 0 &&
           operand->period == node->src[1]->ne[0] && part.n_columns <= operand->n;
}

/* Find the prefix of a node that reads one. False if out of memory. */
static bool follow(
    llmaas_prefixes * prefixes, const struct ggml_cgraph * graph, const struct ggml_tensor * node,
    const llmaas_prefix * operand) {
    const size_t  number = (size_t) (operand - prefixes->all);
    llmaas_prefix to     = {.of = node};
    if (prefixes->all[root(prefixes, operand)].is_void) {
        return true;
    }
    if (!llmaas_prefix_follow(prefixes, node, operand, &to)) {
        make_void(prefixes, operand);
        return true;
    }
    const llmaas_prefix * added  = add(prefixes, graph, &to);
    if (added) {
        join(prefixes, &prefixes->all[number], added);
    }
    return added != NULL;
}

/* Visit a product with a claimed weight: it begins prefixes, or ends them. */
static bool visit_product(
    llmaas_prefixes * prefixes, const struct ggml_cgraph * graph, const struct ggml_tensor * node, llmaas_extent part,
    const llmaas_prefix * operand) {
    if (operand && !is_end(node, part, operand)) {
        make_void(prefixes, operand);
    }
    const llmaas_prefix rows = {.of = node, .period = node->ne[0], .n = part.n_rows};
    return part.n_rows == node->ne[0] || add(prefixes, graph, &rows);
}

static bool visit(
    llmaas_prefixes * prefixes, const llmaas_weights * weights, int32_t level, const struct ggml_cgraph * graph,
    const struct ggml_tensor * node) {
    const bool            is_product = llmaas_is_product(node);
    const llmaas_weight * weight     = is_product ? llmaas_weights_find(weights, node->src[0]) : NULL;
    const llmaas_prefix * operand    = read_operands(prefixes, node);
    if (weight && weight->is_claimed) {
        return visit_product(prefixes, graph, node, llmaas_weight_extent(weight, level), operand);
    }
    return !operand || follow(prefixes, graph, node, operand);
}

bool llmaas_prefixes_find(
    llmaas_prefixes * prefixes, const llmaas_weights * weights, int32_t level, const struct ggml_cgraph * graph) {
    llmaas_prefixes_forget(prefixes);
    if (!reserve(prefixes, (size_t) graph->n_nodes)) {
        return false;
    }
    for (int i = 0; i < graph->n_nodes; i++) {
        if (!visit(prefixes, weights, level, graph, graph->nodes[i])) {
            return false;
        }
    }
    for (size_t i = 0; i < prefixes->n; i++) {
        if (prefixes->all[i].n_unread > 0) { /* a later node reads it; perhaps an app looks at this one */
            make_void(prefixes, &prefixes->all[i]);
        }
    }
    return true;
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
    const llmaas_prefixes * prefixes, llmaas_graph * graph, const llmaas_prefix * prefix, int i) {
    struct ggml_tensor *  whole = prefix->of->src[i];
    const llmaas_prefix * found = llmaas_prefixes_of(prefixes, whole);
    int                   axis;
    const int64_t         n = found || !whole ? 0 : llmaas_prefix_cut(prefix->of, i, prefix, &axis);
    if (n > 0) {
        return llmaas_cut(graph, whole, axis, 0, n);
    }
    return found ? found->narrowed : whole;
}

struct ggml_tensor * llmaas_prefix_make(
    const llmaas_prefixes * prefixes, llmaas_graph * graph, llmaas_prefix * prefix) {
    struct ggml_tensor * node = llmaas_graph_copy(graph, prefix->of);
    if (!node) {
        return NULL;
    }
    node->ne[prefix->axis] = node->ne[prefix->axis] / prefix->period * prefix->n;
    for (int i = 0; i < GGML_MAX_SRC && prefix->of->src[i]; i++) {
        node->src[i] = operand(prefixes, graph, prefix, i);
        if (!node->src[i]) {
            return NULL;
        }
    }
    lay_out(node, node->src[0]);
    prefix->narrowed = node;
    return node;
}
