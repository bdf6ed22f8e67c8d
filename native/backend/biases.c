#include "biases.h"

#include "rows.h"

static void add_biases(void * arg, int ith, int nth) {
    const llmaas_owed * owed = arg;
    const int64_t       n    = ggml_nrows(owed->to);
    for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth; i++) {
        float * row = (float *) (void *) llmaas_row(owed->to, i);
        for (int64_t j = 0; j < owed->to->ne[0]; j++) {
            row[j] += owed->biases[j];
        }
    }
}

static void pay(llmaas_graph * graph, const llmaas_owed * owed) { llmaas_graph_step(graph, add_biases, owed, sizeof *owed); }

/* Return whether only one node reads the tensor. */
static bool has_one_reader(const struct ggml_cgraph * original, const struct ggml_tensor * tensor) {
    return llmaas_graph_uses(original, tensor) == 1 && !(tensor->flags & GGML_TENSOR_FLAG_OUTPUT);
}

void llmaas_biases_owe(
    llmaas_biases * all, llmaas_graph * graph, const struct ggml_cgraph * original, struct ggml_tensor * to,
    const float * biases) {
    const llmaas_owed owed = {to, biases};
    if (all->n_owed < LLMAAS_MAX_OWED && has_one_reader(original, to)) {
        all->owed[all->n_owed++] = owed;
    } else {
        pay(graph, &owed);
    }
}

/* -- adding biases in an addition ---------------------------------------------------------------------------------- */

typedef struct sum {
    const struct ggml_tensor * to;
    const struct ggml_tensor * product;
    const struct ggml_tensor * other; /* of the same shape, or a single row */
    const float *              biases;
} sum;

static void add_all(void * arg, int ith, int nth) {
    const sum *   s = arg;
    const int64_t n = ggml_nrows(s->to), n_others = ggml_nrows(s->other);
    for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth; i++) {
        float *       to      = (float *) (void *) llmaas_row(s->to, i);
        const float * product = (const float *) (const void *) llmaas_row(s->product, i);
        const float * other   = (const float *) (const void *) llmaas_row(s->other, n_others == 1 ? 0 : i);
        for (int64_t j = 0; j < s->to->ne[0]; j++) {
            to[j] = (product[j] + s->biases[j]) + other[j];
        }
    }
}

static bool is_plain(const struct ggml_tensor * tensor, const struct ggml_tensor * like) {
    const bool is_row = tensor->ne[0] == like->ne[0] && ggml_nrows(tensor) == 1;
    return tensor->type == GGML_TYPE_F32 && tensor->nb[0] == sizeof(float) && (is_row || ggml_are_same_shape(tensor, like));
}

static bool pay_in(llmaas_graph * graph, const struct ggml_tensor * node, const llmaas_owed * owed) {
    if (llmaas_op_of(node) != LLMAAS_OP_ADD || !is_plain(node, owed->to)) {
        return false;
    }
    const struct ggml_tensor * other = node->src[0] == owed->to ? node->src[1] : node->src[0];
    if (!ggml_are_same_shape(node, owed->to) || !is_plain(other, node)) {
        return false;
    }
    const sum s = {node, owed->to, other, owed->biases};
    llmaas_graph_step(graph, add_all, &s, sizeof s);
    return true;
}

/* -- when a node reads the tensor ---------------------------------------------------------------------------------- */

static bool reads(const struct ggml_tensor * node, const struct ggml_tensor * tensor) {
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (node->src[i] == tensor) {
            return true;
        }
    }
    return false;
}

/* Pass the biases on to a node that looks up rows of the product, if it is the only reader: those rows lack the same
 * biases. */
static bool hand_on(llmaas_owed * owed, const struct ggml_cgraph * original, struct ggml_tensor * node) {
    const bool is_handed = llmaas_op_of(node) == LLMAAS_OP_GET_ROWS && node->src[0] == owed->to &&
                           node->type == GGML_TYPE_F32 && has_one_reader(original, node);
    owed->to = is_handed ? node : owed->to;
    return is_handed;
}

bool llmaas_biases_settle(
    llmaas_biases * all, llmaas_graph * graph, const struct ggml_cgraph * original, struct ggml_tensor * node) {
    llmaas_owed last = {0};
    for (int i = all->n_owed - 1; i >= 0; i--) {
        if (!reads(node, all->owed[i].to) || hand_on(&all->owed[i], original, node)) {
            continue;
        }
        if (last.to) {
            pay(graph, &last);
        }
        last         = all->owed[i];
        all->owed[i] = all->owed[--all->n_owed];
    }
    if (last.to && !pay_in(graph, node, &last)) {
        pay(graph, &last);
        last.to = NULL;
    }
    return last.to != NULL;
}

void llmaas_biases_end(llmaas_biases * all, llmaas_graph * graph) {
    for (int i = 0; i < all->n_owed; i++) {
        pay(graph, &all->owed[i]);
    }
    all->n_owed = 0;
}
