/* Subscribed taps. */
#include "taps/taps.h"

#include <ctype.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

llmaas_status llmaas_taps_add(llmaas_taps * taps, const llmaas_tap * tap) {
    if (taps->n_taps == LLMAAS_MAX_TAPS) {
        return LLMAAS_ESPACE;
    }
    taps->last_layer[taps->n_taps] = INT_MAX;
    taps->taps[taps->n_taps++]     = *tap;
    return LLMAAS_OK;
}

llmaas_status llmaas_taps_remove(llmaas_taps * taps, const void * user) {
    for (int i = 0; i < taps->n_taps; i++) {
        if (taps->taps[i].user == user) {
            taps->n_taps--;
            taps->taps[i]       = taps->taps[taps->n_taps];
            taps->last_layer[i] = taps->last_layer[taps->n_taps];
            return LLMAAS_OK;
        }
    }
    return LLMAAS_EINVAL;
}

void llmaas_taps_forget(llmaas_taps * taps) { taps->cells = taps->positions = NULL; }

/* Return the number behind `prefix` in a tensor's name; -1 if the name is different. (sscanf would take longer than all
 * the rest.) */
static int numbered(const struct ggml_tensor * tensor, const char * prefix) {
    const size_t n = strlen(prefix);
    return strncmp(tensor->name, prefix, n) == 0 && isdigit((unsigned char) tensor->name[n]) ? atoi(tensor->name + n) : -1;
}

/* Return the layer of the key cache that `tensor` is or views; -1 if it is none. */
static int cache_layer(const struct ggml_tensor * tensor) {
    return numbered(tensor->view_src ? tensor->view_src : tensor, "cache_k_l"); /* view_src is the root of all views */
}

/* Return the tensor that a node takes tokens' positions from; NULL if it uses none. */
static struct ggml_tensor * positions_of(const struct ggml_tensor * node) {
    return llmaas_op_of(node) == LLMAAS_OP_ROPE && node->src[1]->type == GGML_TYPE_I32 ? node->src[1] : NULL;
}

static struct ggml_tensor * cells_of(const struct ggml_tensor * node) {
    const bool is_set = llmaas_op_of(node) == LLMAAS_OP_SET_ROWS && node->src[1]->type == GGML_TYPE_I64;
    return is_set && cache_layer(node) >= 0 ? node->src[1] : NULL;
}

void llmaas_taps_notice(llmaas_taps * taps, const struct ggml_tensor * node) {
    struct ggml_tensor * positions = positions_of(node);
    struct ggml_tensor * cells     = cells_of(node);
    taps->positions = positions ? positions : taps->positions;
    taps->cells     = cells ? cells : taps->cells;
}

static void keep(struct ggml_tensor * tensor) {
    if (tensor) {
        ggml_set_output(tensor->view_src ? tensor->view_src : tensor); /* ggml never reuses the memory of outputs */
    }
}

void llmaas_taps_keep(const struct ggml_tensor * node) {
    keep(positions_of(node));
    keep(cells_of(node));
}

struct call {
    llmaas_tap      tap;
    llmaas_tap_view view;
};

static void run_tap(void * arg, int ith, int nth) {
    const struct call * call = arg;
    call->tap.run(call->tap.user, &call->view, ith, nth);
}

static uint32_t call_taps(llmaas_taps * taps, llmaas_graph * graph, const llmaas_tap_view * view) {
    uint32_t n_calls = 0;
    for (int i = 0; i < taps->n_taps; i++) {
        const llmaas_tap * tap = &taps->taps[i];
        if (tap->kind == view->kind && (!tap->wants || tap->wants(tap->user, view->layer))) {
            struct call call   = {*tap, *view};
            call.view.is_first = view->layer <= taps->last_layer[i];
            taps->last_layer[i] = view->layer;
            n_calls++;
            if (!tap->settles || !tap->settles(tap->user, &call.view)) {
                llmaas_graph_step(graph, run_tap, &call, sizeof call);
            }
        }
    }
    return n_calls;
}

uint32_t llmaas_taps_states(
    llmaas_taps * taps, llmaas_graph * graph, llmaas_tap_kind kind, int layer, const struct ggml_tensor * states) {
    const llmaas_tap_view view = {.kind = kind, .layer = layer, .states = states};
    return call_taps(taps, graph, &view);
}

/* Return the layer of an attention node; -1 for other nodes. */
static int attention_layer(const struct ggml_tensor * node) {
    if (llmaas_op_of(node) == LLMAAS_OP_FLASH_ATTN_EXT) {
        return cache_layer(node->src[1]);
    }
    return llmaas_op_of(node) == LLMAAS_OP_SOFT_MAX ? numbered(node, "kq_soft_max-") : -1;
}

uint32_t llmaas_taps_attention(
    llmaas_taps * taps, llmaas_graph * graph, const struct ggml_tensor * node, int64_t first_cell) {
    const int layer = attention_layer(node);
    if (layer < 0) {
        return 0;
    }
    const llmaas_tap_view view = {.kind       = LLMAAS_TAP_ATTENTION,
                                  .layer      = layer,
                                  .node       = node,
                                  .cells      = taps->cells,
                                  .positions  = taps->positions,
                                  .first_cell = first_cell};
    return call_taps(taps, graph, &view);
}
