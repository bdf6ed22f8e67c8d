/* Engines: ggml CPU backends whose graph_compute rewrites the graph before it calls ggml-cpu's. */
#include "engine/engine.h"

#include <stdio.h>
#include <stdlib.h>

static _Thread_local ggml_threadpool_t next_pool;

void llmaas_engine_next_threadpool(ggml_threadpool_t pool) { next_pool = pool; }

/* -- rewriting --------------------------------------------------------------------------------------------------- */

/* Return the node, narrowed to the rows that its operands still compute. NULL if nothing is left of it, or if out of
 * memory. */
static struct ggml_tensor * in_use(llmaas_engine * engine, struct ggml_tensor * node) {
    llmaas_pruned * pruned = llmaas_pruning_of(&engine->pruning, node);
    engine->n_cut += pruned != NULL;
    if (!pruned) {
        return node;
    }
    return pruned->n > 0 ? llmaas_pruned_make(&engine->pruning, engine->graph, pruned) : NULL;
}

/* Make a product read a pruned operand, which is enough for the product's columns. NULL if out of
 * memory. */
static struct ggml_tensor * with_operand(llmaas_engine * engine, struct ggml_tensor * node, struct ggml_tensor * operand) {
    struct ggml_tensor * product = operand == node->src[1] ? node : llmaas_graph_copy(engine->graph, node);
    if (product) {
        product->src[1] = operand;
    }
    return product;
}

static void multiply(llmaas_engine * engine, int32_t level, const llmaas_weight * weight, struct ggml_tensor * node) {
    if (weight && weight->is_claimed && llmaas_weight_multiply(weight, level, engine->graph, node)) {
        engine->n_products++;
    } else {
        llmaas_graph_append(engine->graph, node);
    }
}

/* Rewrite a product: append the steps of the taps that read its operand, then the product's replacement. */
static void rewrite_product(
    llmaas_engine * engine, int32_t level, const struct ggml_cgraph * original, struct ggml_tensor * node) {
    const llmaas_weight * weight  = llmaas_weights_find(engine->weights, node->src[0]);
    const llmaas_pruned * pruned  = llmaas_pruning_of(&engine->pruning, node->src[1]);
    struct ggml_tensor *  operand = pruned ? pruned->narrowed : node->src[1];
    if (operand && weight && weight->tap_kind >= 0) {
        engine->n_taps += llmaas_taps_states(
            &engine->taps, engine->graph, (llmaas_tap_kind) weight->tap_kind, weight->tap_layer, operand);
    }
    struct ggml_tensor * product = in_use(engine, node);
    if (product == node && operand) {
        product = with_operand(engine, node, operand);
    }
    if (product) {
        multiply(engine, level, weight, product);
    }
    if (product && weight) {
        llmaas_weight_adapt(weight, level, engine->graph, product);
    }
    const float * biases = weight ? llmaas_weight_biases(weight, level) : NULL;
    if (biases) {
        llmaas_biases_defer(&engine->biases, engine->graph, original, node, biases);
    }
}

/* Append the taps first, with the original node: its result may overwrite an operand that they read. */
static void rewrite_flash(llmaas_engine * engine, struct ggml_tensor * node) {
    engine->n_taps += llmaas_taps_attention(&engine->taps, engine->graph, node, 0);
    struct ggml_tensor * narrowed = llmaas_narrow_flash(&engine->narrow, engine->graph, node);
    engine->n_narrowed += narrowed != NULL;
    llmaas_graph_append(engine->graph, narrowed ? narrowed : node);
}

/* Rewrite attention without flash attention, from nodes[0] on. When it is narrowed to a range, taps see only the
 * range's probabilities. */
static void rewrite_attention(llmaas_engine * engine, const llmaas_visible * visible, struct ggml_tensor ** original) {
    struct ggml_tensor * nodes[3];
    llmaas_narrow_nodes  narrowed;
    for (int i = 0; i < 3; i++) {
        nodes[i] = in_use(engine, original[i]);
        if (!nodes[i]) {
            return;
        }
    }
    engine->n_narrowed++;
    if (visible->n_runs > 0) {
        llmaas_runs_scores(visible, engine->graph, nodes[0]);
        llmaas_graph_append(engine->graph, nodes[1]);
        engine->n_taps += llmaas_taps_attention(&engine->taps, engine->graph, nodes[1], 0);
        llmaas_runs_result(visible, engine->graph, nodes[2]);
    } else if (llmaas_narrow_products(visible, engine->graph, nodes, &narrowed)) {
        llmaas_graph_append(engine->graph, narrowed.scores);
        llmaas_graph_append(engine->graph, narrowed.probabilities);
        engine->n_taps += llmaas_taps_attention(&engine->taps, engine->graph, narrowed.probabilities, visible->first);
        llmaas_graph_append(engine->graph, narrowed.result);
    }
}

/* Rewrite a lookup: rows that are not in memory are read first. */
static void rewrite_lookup(llmaas_engine * engine, struct ggml_tensor * node) {
    const llmaas_weight * weight = llmaas_weights_find(engine->weights, node->src[0]);
    if (!weight || !weight->lookup) {
        llmaas_graph_append(engine->graph, node);
    } else if (!llmaas_lookup_rows(weight->lookup, engine->graph, node)) {
        llmaas_graph_fail(engine->graph);
    }
}

static void append(llmaas_engine * engine, struct ggml_tensor * node) {
    llmaas_taps_notice(&engine->taps, node);
    llmaas_graph_append(engine->graph, node);
}

static void rewrite_other(llmaas_engine * engine, struct ggml_tensor * node) {
    switch (llmaas_op_of(node)) {
        case LLMAAS_OP_GET_ROWS:
            rewrite_lookup(engine, node);
            break;
        case LLMAAS_OP_FLASH_ATTN_EXT:
            rewrite_flash(engine, node);
            break;
        case LLMAAS_OP_SOFT_MAX:
            llmaas_graph_append(engine->graph, node);
            engine->n_taps += llmaas_taps_attention(&engine->taps, engine->graph, node, 0);
            break;
        case LLMAAS_OP_SET_ROWS:
            llmaas_pruning_clear_rest(&engine->pruning, engine->graph, node->src[0]);
            append(engine, node);
            break;
        default:
            append(engine, node);
    }
}

static void rewrite_node(
    llmaas_engine * engine, int32_t level, const struct ggml_cgraph * original, struct ggml_tensor * node) {
    if (llmaas_biases_fuse(&engine->biases, engine->graph, original, node)) {
        return;
    }
    if (llmaas_is_product(node)) {
        rewrite_product(engine, level, original, node);
        return;
    }
    struct ggml_tensor * used = in_use(engine, node);
    if (used) {
        rewrite_other(engine, used);
    }
}

/* Return whether the graph is of one token. Its first product with a weight has a row for every token; later ones only
 * for tokens whose logits somebody asked for. */
static bool is_of_one_token(const struct ggml_cgraph * original) {
    for (int i = 0; i < original->n_nodes; i++) {
        const struct ggml_tensor * node = original->nodes[i];
        if (llmaas_op_of(node) == LLMAAS_OP_MUL_MAT && node->src[0]->buffer &&
            ggml_backend_buffer_get_usage(node->src[0]->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
            return ggml_nrows(node->src[1]) == 1;
        }
    }
    return false;
}

static struct ggml_cgraph * rewrite(llmaas_engine * engine, int32_t level, struct ggml_cgraph * original) {
    llmaas_graph_begin(engine->graph, original);
    llmaas_graph_set_sparse(engine->graph, engine->is_sparse && is_of_one_token(original));
    llmaas_pruning_forget(&engine->pruning);
    if (llmaas_weights_are_cut(engine->weights, level) &&
        !llmaas_pruning_find(&engine->pruning, engine->weights, level, original)) {
        llmaas_graph_fail(engine->graph);
        return NULL;
    }
    for (int i = 0; i < original->n_nodes; i++) {
        const llmaas_visible * visible = llmaas_narrow_attention(&engine->narrow, original, i);
        if (visible) {
            rewrite_attention(engine, visible, original->nodes + i);
            i += 2;
        } else {
            rewrite_node(engine, level, original, original->nodes[i]);
        }
    }
    llmaas_biases_flush(&engine->biases, engine->graph);
    return llmaas_graph_end(engine->graph);
}

/* Check after a graph whether the weights' files, if any, are unchanged since they were opened. If not, or if a read
 * failed, store the reason. */
static void check_files(llmaas_engine * engine) {
    const char * changed = llmaas_weights_changed(engine->weights);
    if (changed) {
        llmaas_graph_fail(engine->graph);
        snprintf(engine->failure, sizeof engine->failure, "%s was changed while it was in use; load the model again", changed);
    } else if (llmaas_graph_failed(engine->graph) && llmaas_weights_own_buffers(engine->weights)) {
        snprintf(engine->failure, sizeof engine->failure, "a read from the model's files failed; see whether the disk is well");
    }
}

/* Fail in a forked child: another thread was changing the engine's state at the fork, so it cannot be used. */
static enum ggml_status is_void(llmaas_engine * engine) {
    snprintf(engine->failure, sizeof engine->failure,
             "another thread was computing with this model when the process was forked; load the model again in the child");
    return GGML_STATUS_FAILED;
}

static bool begin_stream(
    llmaas_engine * engine, llmaas_stream * stream, const struct ggml_cgraph * original, bool is_new) {
    const int64_t n_more = is_new ? llmaas_compute_buffers_fit(&engine->compute_buffers, original) : 0;
    return llmaas_stream_begin(stream, engine->graph, n_more);
}

static enum ggml_status compute_rewritten(
    llmaas_engine * engine, int32_t level, struct ggml_cgraph * original, bool is_new) {
    llmaas_weights_lock(engine->weights);
    llmaas_stream * stream = llmaas_weights_stream(engine->weights);
    if (llmaas_weights_are_void(engine->weights) || (stream && !begin_stream(engine, stream, original, is_new))) {
        llmaas_weights_unlock(engine->weights);
        return is_void(engine);
    }
    struct ggml_cgraph * graph  = rewrite(engine, level, original);
    enum ggml_status     status = GGML_STATUS_ALLOC_FAILED;
    if (graph && (!stream || llmaas_stream_start(stream))) {
        const bool is_same = llmaas_graph_is(engine->graph, original);
        status = engine->cpu->iface.graph_compute(&engine->base, is_same ? original : graph);
        check_files(engine);
        status = llmaas_graph_failed(engine->graph) ? GGML_STATUS_FAILED : status;
    }
    if (stream) {
        llmaas_stream_end(stream);
    }
    llmaas_weights_unlock(engine->weights);
    return status;
}

/* -- ggml's interface -------------------------------------------------------------------------------------------- */

static const char * get_name(ggml_backend_t backend) {
    (void) backend;
    return "LLMAAS";
}

static void destroy(ggml_backend_t backend) {
    llmaas_engine * engine = (llmaas_engine *) backend;
    ggml_backend_free(engine->cpu);
    llmaas_graph_free(engine->graph);
    llmaas_pruning_free(&engine->pruning);
    llmaas_weights_release(engine->weights);
    llmaas_fork_lock_destroy(&engine->lock);
    llmaas_engine_gone(engine);
    free(engine);
}

static enum ggml_status compute(llmaas_engine * engine, struct ggml_cgraph * graph) {
    const int32_t level = engine->level;
    engine->n_graphs++;
    engine->failure[0] = '\0';
    llmaas_cells_reach(&engine->cells);
    const bool is_new = llmaas_compute_buffers_notice(&engine->compute_buffers, graph);
    llmaas_narrow_forget(&engine->narrow);
    const bool is_narrowed = engine->is_narrow && llmaas_narrow_read(&engine->narrow, graph);
    if (is_narrowed || engine->taps.n_taps > 0 || llmaas_weights_change(engine->weights, level)) {
        return compute_rewritten(engine, level, graph, is_new);
    }
    engine->n_passed++;
    return engine->cpu->iface.graph_compute(&engine->base, graph);
}

static enum ggml_status graph_compute(ggml_backend_t backend, struct ggml_cgraph * graph) {
    llmaas_engine * engine = (llmaas_engine *) backend;
    ggml_backend_cpu_set_threadpool(backend, next_pool);
    pthread_mutex_lock(&engine->lock.mutex);
    engine->lock.is_computing     = true;
    const int n_taps              = engine->taps.n_taps;
    engine->taps.n_taps           = engine->is_unobserved ? 0 : n_taps;
    const enum ggml_status status = engine->lock.is_void ? is_void(engine) : compute(engine, graph);
    engine->taps.n_taps           = n_taps;
    engine->lock.is_computing     = false;
    pthread_mutex_unlock(&engine->lock.mutex);
    return status;
}

/* This optimizes nothing: it is where ggml shows us all nodes of a new graph. The graphs of a context's creation
 * contain every weight of its model, and nothing of a LoRA adapter. */
static void graph_optimize(ggml_backend_t backend, struct ggml_cgraph * graph, void * params) {
    llmaas_engine * engine = (llmaas_engine *) backend;
    llmaas_taps_forget(&engine->taps); /* the tensors of the previous graph are gone */
    for (int i = 0; i < graph->n_nodes; i++) {
        llmaas_taps_keep(graph->nodes[i]);
    }
    const bool is_creation = llmaas_engine_in_creation(engine);
    if (is_creation) {
        llmaas_weights_note(engine->weights, graph);
    }
    pthread_mutex_lock(&engine->lock.mutex);
    llmaas_cells_notice(&engine->cells, graph, is_creation);
    llmaas_compute_buffers_forget(&engine->compute_buffers);
    if (is_creation) {
        llmaas_compute_buffers_reserve(&engine->compute_buffers, graph);
    }
    pthread_mutex_unlock(&engine->lock.mutex);
    (void) params;
}

llmaas_engine * llmaas_engine_new(ggml_backend_dev_t device, llmaas_weights * weights) {
    llmaas_engine * engine = calloc(1, sizeof *engine);
    if (!engine) {
        return NULL;
    }
    engine->cpu     = ggml_backend_cpu_init();
    engine->graph   = llmaas_graph_new();
    engine->weights = weights ? llmaas_weights_retain(weights) : llmaas_weights_new();
    if (!engine->cpu || !engine->graph || !engine->weights || !llmaas_fork_lock_init(&engine->lock, NULL)) {
        ggml_backend_free(engine->cpu);
        llmaas_graph_free(engine->graph);
        llmaas_weights_release(engine->weights);
        free(engine);
        return NULL;
    }
    engine->base                      = *engine->cpu;
    engine->base.iface.get_name       = get_name;
    engine->base.iface.free           = destroy;
    engine->base.iface.graph_compute  = graph_compute;
    engine->base.iface.graph_optimize = graph_optimize;
    llmaas_compute_buffers_init(&engine->compute_buffers);
    /* llama.cpp turns off features (flash attention on "auto") that it finds on a device other than the layer's own. So
     * use the CPU device wherever possible: not with weights in buffers that only our device takes. */
    if (llmaas_weights_own_buffers(engine->weights)) {
        engine->base.device = device;
    }
    return engine;
}

/* -- the API ----------------------------------------------------------------------------------------------------- */

void    llmaas_engine_set_level(llmaas_engine * engine, int32_t level) { engine->level = level; }
int32_t llmaas_engine_level(const llmaas_engine * engine) { return engine->level; }

void llmaas_engine_set_narrow(llmaas_engine * engine, bool is_narrow) { engine->is_narrow = is_narrow; }
bool llmaas_engine_is_narrow(const llmaas_engine * engine) { return engine->is_narrow; }

void llmaas_engine_set_sparse(llmaas_engine * engine, bool is_sparse) { engine->is_sparse = is_sparse; }
bool llmaas_engine_is_sparse(const llmaas_engine * engine) { return engine->is_sparse; }

void llmaas_engine_set_unobserved(llmaas_engine * engine, bool is_unobserved) { engine->is_unobserved = is_unobserved; }

llmaas_status llmaas_engine_subscribe(llmaas_engine * engine, const llmaas_tap * tap) {
    pthread_mutex_lock(&engine->lock.mutex);
    const llmaas_status status = llmaas_taps_add(&engine->taps, tap);
    pthread_mutex_unlock(&engine->lock.mutex);
    return status;
}

llmaas_status llmaas_engine_unsubscribe(llmaas_engine * engine, const void * user) {
    pthread_mutex_lock(&engine->lock.mutex);
    const llmaas_status status = llmaas_taps_remove(&engine->taps, user);
    pthread_mutex_unlock(&engine->lock.mutex);
    return status;
}

void llmaas_engine_read_stats(const llmaas_engine * engine, llmaas_engine_stats * stats) {
    *stats = (llmaas_engine_stats) {
        engine->n_graphs, engine->n_passed, engine->n_products, engine->n_taps, engine->n_narrowed, engine->n_cut};
}

const char * llmaas_engine_failure(const llmaas_engine * engine) { return engine->failure[0] ? engine->failure : NULL; }

llmaas_cell_memory llmaas_engine_cells(llmaas_engine * engine) {
    pthread_mutex_lock(&engine->lock.mutex);
    const llmaas_cell_memory memory = llmaas_cells_memory(&engine->cells);
    pthread_mutex_unlock(&engine->lock.mutex);
    return memory;
}

llmaas_status llmaas_engine_release_cells(llmaas_engine * engine) {
    pthread_mutex_lock(&engine->lock.mutex);
    const llmaas_status status = llmaas_cells_release(&engine->cells);
    pthread_mutex_unlock(&engine->lock.mutex);
    return status;
}

uint64_t llmaas_engine_untouched(llmaas_engine * engine) {
    pthread_mutex_lock(&engine->lock.mutex);
    const uint64_t n_bytes = llmaas_compute_buffers_untouched(&engine->compute_buffers);
    pthread_mutex_unlock(&engine->lock.mutex);
    return n_bytes;
}

llmaas_status llmaas_engine_land(
    llmaas_engine * engine, llmaas_set_data set_data, void * ctx, int32_t sequence, const uint8_t * blob, uint64_t n_bytes,
    llmaas_landing * landings, uint32_t n_landings) {
    pthread_mutex_lock(&engine->lock.mutex);
    engine->lock.is_computing = true; /* llama.cpp may log; a Python log callback may then wait for a thread that
                                       * forks */
    const llmaas_status status =
        llmaas_cells_land(&engine->cells, set_data, ctx, sequence, blob, n_bytes, landings, n_landings);
    engine->lock.is_computing = false;
    pthread_mutex_unlock(&engine->lock.mutex);
    return status;
}
