#include "weights/biases.h"

#include "base/rows.h"

static void add_biases(void * arg, int ith, int nth) {
    const llmaas_deferred_bias * deferred = arg;
    const int64_t       n    = ggml_nrows(deferred->to);
    for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth; i++) {
        float * row = (float *) (void *) llmaas_row(deferred->to, i);
        for (int64_t j = 0; j < deferred->to->ne[0]; j++) {
            row[j] += deferred->biases[j];
        }
    }
}

static void add_now(llmaas_graph * graph, const llmaas_deferred_bias * deferred) { llmaas_graph_step(graph, add_biases, deferred, sizeof *deferred); }

/* Return whether only one node reads the tensor. */
static bool has_one_reader(const struct ggml_cgraph * original, const struct ggml_tensor * tensor) {
    return llmaas_graph_uses(original, tensor) == 1 && !(tensor->flags & GGML_TENSOR_FLAG_OUTPUT);
}

void llmaas_biases_defer(
    llmaas_biases * all, llmaas_graph * graph, const struct ggml_cgraph * original, struct ggml_tensor * to,
    const float * biases) {
    const llmaas_deferred_bias deferred = {to, biases};
    if (all->n_deferred < LLMAAS_MAX_DEFERRED && has_one_reader(original, to)) {
        all->deferred[all->n_deferred++] = deferred;
    } else {
        add_now(graph, &deferred);
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

static bool fuse_into(llmaas_graph * graph, const struct ggml_tensor * node, const llmaas_deferred_bias * deferred) {
    if (llmaas_op_of(node) != LLMAAS_OP_ADD || !is_plain(node, deferred->to)) {
        return false;
    }
    const struct ggml_tensor * other = node->src[0] == deferred->to ? node->src[1] : node->src[0];
    if (!ggml_are_same_shape(node, deferred->to) || !is_plain(other, node)) {
        return false;
    }
    const sum s = {node, deferred->to, other, deferred->biases};
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
static bool pass_on(llmaas_deferred_bias * deferred, const struct ggml_cgraph * original, struct ggml_tensor * node) {
    const bool is_passed = llmaas_op_of(node) == LLMAAS_OP_GET_ROWS && node->src[0] == deferred->to &&
                           node->type == GGML_TYPE_F32 && has_one_reader(original, node);
    deferred->to = is_passed ? node : deferred->to;
    return is_passed;
}

bool llmaas_biases_fuse(
    llmaas_biases * all, llmaas_graph * graph, const struct ggml_cgraph * original, struct ggml_tensor * node) {
    llmaas_deferred_bias last = {0};
    for (int i = all->n_deferred - 1; i >= 0; i--) {
        if (!reads(node, all->deferred[i].to) || pass_on(&all->deferred[i], original, node)) {
            continue;
        }
        if (last.to) {
            add_now(graph, &last);
        }
        last         = all->deferred[i];
        all->deferred[i] = all->deferred[--all->n_deferred];
    }
    if (last.to && !fuse_into(graph, node, &last)) {
        add_now(graph, &last);
        last.to = NULL;
    }
    return last.to != NULL;
}

void llmaas_biases_flush(llmaas_biases * all, llmaas_graph * graph) {
    for (int i = 0; i < all->n_deferred; i++) {
        add_now(graph, &all->deferred[i]);
    }
    all->n_deferred = 0;
}
