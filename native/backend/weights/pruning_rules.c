/* How nodes pass the pruning of an operand on. Any node not listed here needs all of its operands. */
#include "weights/pruning.h"

#include <string.h>

/* -- element by element -------------------------------------------------------------------------------------------- */

static bool is_whole_axis(const llmaas_pruned * pruned) { return pruned->period == pruned->of->ne[pruned->axis]; }

static bool is_apart(const struct ggml_tensor * a, const struct ggml_tensor * b) {
    const char * from_a = a->data, * from_b = b->data;
    return from_a + ggml_nbytes(a) <= from_b || from_b + ggml_nbytes(b) <= from_a;
}

/* Return whether an operand fits a node that has the shape of `from`: it is pruned alike, can be cut to it, or has
 * one value for the whole axis. Narrowed nodes have no gaps, so a node must not overwrite an operand that has gaps. */
static bool goes_with(
    const llmaas_pruning * pruning, const struct ggml_tensor * node, const struct ggml_tensor * operand,
    const llmaas_pruned * from) {
    const llmaas_pruned * own = llmaas_pruning_of(pruning, operand);
    if (own) {
        return ggml_are_same_shape(operand, node) && own->axis == from->axis && own->period == from->period &&
               own->n == from->n;
    }
    return operand->ne[from->axis] == 1 ||
           (operand->ne[from->axis] == node->ne[from->axis] && is_whole_axis(from) && is_apart(node, operand));
}

static bool follow_elements(
    const llmaas_pruning * pruning, const struct ggml_tensor * node, const llmaas_pruned * from) {
    const struct ggml_tensor * second = node->src[1];
    return ggml_are_same_shape(from->of, node) && goes_with(pruning, node, node->src[0], from) &&
           (!second || goes_with(pruning, node, second, from));
}

/* -- reshapes ------------------------------------------------------------------------------------------------------ */

/* Find what is computed, in another shape of the same values. In memory order, it is the first n of every `period`
 * values. The same holds in the other shape, if an axis there matches. */
static bool follow_shape(const struct ggml_tensor * node, const llmaas_pruned * from, llmaas_pruned * to) {
    int64_t n_each = 1;
    for (int i = 0; i < from->axis; i++) {
        n_each *= from->of->ne[i];
    }
    const int64_t period = n_each * from->period, n = n_each * from->n;
    n_each = 1;
    for (int axis = 0; axis < GGML_MAX_DIMS; axis++) {
        if (period % n_each == 0 && n % n_each == 0 && n_each * node->ne[axis] % period == 0) {
            to->axis   = axis;
            to->period = period / n_each;
            to->n      = n / n_each;
            return true;
        }
        n_each *= node->ne[axis];
    }
    return false;
}

static bool is_reshape(const struct ggml_tensor * view) {
    const struct ggml_tensor * of = view->src[0];
    return view->data == of->data && ggml_nelements(view) == ggml_nelements(of) && ggml_is_contiguous(view) &&
           ggml_is_contiguous(of);
}

/* -- heads --------------------------------------------------------------------------------------------------------- */

/* Return whether n heads are whole groups. Query heads share the heads of keys and values in groups: n heads must be
 * the first groups, or all heads share one. */
static bool are_groups(int64_t n_heads, const struct ggml_tensor * shared, int64_t n) {
    return shared->ne[2] == 1 || n % (n_heads / shared->ne[2]) == 0;
}

static bool has_slopes(const struct ggml_tensor * node) {
    float max_bias;
    memcpy(&max_bias, (const char *) node->op_params + sizeof(float), sizeof max_bias); /* at the same place for both
                                                                                         * operations */
    return max_bias != 0.0f;
}

static bool is_for_all_heads(const struct ggml_tensor * mask) { return !mask || mask->ne[2] == 1; }

static bool follow_flash(const struct ggml_tensor * node, const llmaas_pruned * from) {
    const int64_t n_heads = node->src[0]->ne[2];
    return from->axis == 2 && is_whole_axis(from) && are_groups(n_heads, node->src[1], from->n) &&
           are_groups(n_heads, node->src[2], from->n) && is_for_all_heads(node->src[3]) && !node->src[4] &&
           !has_slopes(node);
}

static bool follow_soft_max(const struct ggml_tensor * node, const llmaas_pruned * from) {
    return from->axis == 2 && is_for_all_heads(node->src[1]) && !node->src[2] && !has_slopes(node);
}

/* Follow a product along rows of the second operand, or along heads: those are computed independently. */
static bool follow_product(const struct ggml_tensor * node, const llmaas_pruned * from) {
    switch (from->axis) {
        case 1:
            return true;
        case 2:
            return node->src[0]->ne[2] == 1 ||
                   (is_whole_axis(from) && are_groups(node->ne[2], node->src[0], from->n));
        default:
            return false;
    }
}

/* -- nodes --------------------------------------------------------------------------------------------------------- */

/* Return whether operand i is the tensor of `from`, and the only pruned operand. */
static bool is_alone(const llmaas_pruning * pruning, const struct ggml_tensor * node, int i, const llmaas_pruned * from) {
    bool is = node->src[i] == from->of;
    for (int other = 0; is && other < GGML_MAX_SRC; other++) {
        is = other == i || !llmaas_pruning_of(pruning, node->src[other]);
    }
    return is;
}

/* Return whether a node leaves values as they are. Others make biases, negative zeros or, with an epsilon of 0, NaN of
 * zeros. */
static bool keeps_values(const struct ggml_tensor * node) {
    switch (llmaas_op_of(node)) {
        case LLMAAS_OP_PERMUTE:
        case LLMAAS_OP_VIEW:
        case LLMAAS_OP_RESHAPE:
        case LLMAAS_OP_CONT:
            return true;
        default:
            return false;
    }
}

bool llmaas_pruned_follow(
    const llmaas_pruning * pruning, const struct ggml_tensor * node, const llmaas_pruned * from, llmaas_pruned * to) {
    to->axis     = from->axis;
    to->period   = from->period;
    to->n        = from->n;
    to->has_rest = from->has_rest || !keeps_values(node);
    switch (llmaas_op_of(node)) {
        case LLMAAS_OP_ADD:
        case LLMAAS_OP_MUL:
        case LLMAAS_OP_GLU:
            return follow_elements(pruning, node, from);
        case LLMAAS_OP_SCALE:
        case LLMAAS_OP_UNARY:
            return true;
        case LLMAAS_OP_RMS_NORM:
            return from->axis > 0;
        case LLMAAS_OP_ROPE:
            return from->axis == 1 && is_alone(pruning, node, 0, from);
        case LLMAAS_OP_PERMUTE:
            to->axis = node->op_params[from->axis];
            return true;
        case LLMAAS_OP_VIEW:
            return is_reshape(node) && follow_shape(node, from, to);
        case LLMAAS_OP_RESHAPE:
        case LLMAAS_OP_CONT:
            return follow_shape(node, from, to);
        case LLMAAS_OP_MUL_MAT:
            return is_alone(pruning, node, 1, from) && follow_product(node, from);
        case LLMAAS_OP_SOFT_MAX:
            return is_alone(pruning, node, 0, from) && follow_soft_max(node, from);
        case LLMAAS_OP_FLASH_ATTN_EXT:
            to->axis = 1;
            return is_alone(pruning, node, 0, from) && follow_flash(node, from);
        default:
            return false;
    }
}

int64_t llmaas_pruned_cut(const struct ggml_tensor * node, int i, const llmaas_pruned * of_node, int * axis) {
    const struct ggml_tensor * operand = node->src[i];
    switch (llmaas_op_of(node)) {
        case LLMAAS_OP_ADD:
        case LLMAAS_OP_MUL:
        case LLMAAS_OP_GLU:
            *axis = of_node->axis;
            return operand->ne[*axis] > 1 ? of_node->n : 0;
        case LLMAAS_OP_MUL_MAT:
            *axis = 2;
            return i == 0 && of_node->axis == 2 && operand->ne[2] > 1 ? of_node->n / (node->ne[2] / operand->ne[2]) : 0;
        case LLMAAS_OP_FLASH_ATTN_EXT:
            *axis = 2;
            return (i == 1 || i == 2) && operand->ne[2] > 1 ? of_node->n / (node->ne[1] / operand->ne[2]) : 0;
        default:
            return 0;
    }
}
