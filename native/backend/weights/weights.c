/* The weight table. */
#include "weights/weights_table.h"

#include "llmaas/io.h"
#include "src/grow.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { READ_ALIGN = 4096 };

/* Initialize a lock that prefers writers. Contexts that compute without pause hold the read lock among them all the
 * time, and the creation of another context must get in before the next graph. */
static bool init_lock(pthread_rwlock_t * lock) {
    pthread_rwlockattr_t kind;
    if (pthread_rwlockattr_init(&kind) != 0) {
        return false;
    }
    pthread_rwlockattr_setkind_np(&kind, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    const bool ok = pthread_rwlock_init(lock, &kind) == 0;
    pthread_rwlockattr_destroy(&kind);
    return ok;
}

/* Renew the lock in a forked child: it still counts the threads that computed, which the child does not have. */
static void forget_readers(llmaas_fork_lock * changing) {
    llmaas_weights * weights = (llmaas_weights *) ((char *) changing - offsetof(llmaas_weights, changing));
    init_lock(&weights->lock);
}

llmaas_weights * llmaas_weights_new(void) {
    llmaas_weights * weights = calloc(1, sizeof *weights);
    if (!weights || !init_lock(&weights->lock) || !llmaas_fork_lock_init(&weights->changing, forget_readers)) {
        free(weights);
        return NULL;
    }
    weights->n_holders = 1;
    return weights;
}

llmaas_weights * llmaas_weights_retain(llmaas_weights * weights) {
    if (weights) {
        weights->n_holders++;
    }
    return weights;
}

void llmaas_weights_release(llmaas_weights * weights) {
    if (!weights || --weights->n_holders > 0) {
        return;
    }
    for (size_t i = 0; i < weights->n_entries; i++) {
        if (weights->entries[i]->source->unload) {
            weights->entries[i]->source->unload(weights->entries[i]);
        }
        llmaas_lookup_free(weights->entries[i]->lookup);
        free(weights->entries[i]->biases);
        free(weights->entries[i]->adapters);
        free(weights->entries[i]);
    }
    llmaas_stream_free(weights->stream);
    for (size_t i = 0; i < weights->n_files; i++) {
        close(weights->files[i].fd);
        free(weights->files[i].path);
    }
    free(weights->files);
    free(weights->operands);
    free(weights->entries);
    free(weights->slots);
    llmaas_fork_lock_destroy(&weights->changing);
    pthread_rwlock_destroy(&weights->lock);
    free(weights);
}

llmaas_weight * llmaas_weights_by_name(const llmaas_weights * weights, const char * name) {
    for (size_t i = 0; i < weights->n_entries; i++) {
        if (strcmp(weights->entries[i]->name, name) == 0) {
            return weights->entries[i];
        }
    }
    return NULL;
}

llmaas_weight * llmaas_weights_entry(llmaas_weights * weights, const char * name) {
    llmaas_weight * found = llmaas_weights_by_name(weights, name);
    if (found || strlen(name) >= GGML_MAX_NAME) {
        return found;
    }
    llmaas_weight ** entries = llmaas_grown(weights->entries, weights->n_entries, &weights->n_capacity, sizeof *entries);
    if (!entries) {
        return NULL;
    }
    weights->entries = entries;
    llmaas_weight * made = calloc(1, sizeof *made);
    if (made) {
        strcpy(made->name, name);
        made->source   = &llmaas_source_in_place;
        made->tap_kind = -1;
        weights->entries[weights->n_entries++] = made;
    }
    return made;
}

/* -- lookup by tensor -------------------------------------------------------------------------------------------- */

static size_t slot_of(const llmaas_weights * weights, const struct ggml_tensor * tensor) {
    size_t slot = ((uintptr_t) tensor >> 4) * 0x9E3779B97F4A7C15u >> 20 & (weights->n_slots - 1);
    while (weights->slots[slot] && weights->slots[slot]->tensor != tensor) {
        slot = (slot + 1) & (weights->n_slots - 1);
    }
    return slot;
}

const llmaas_weight * llmaas_weights_find(const llmaas_weights * weights, const struct ggml_tensor * tensor) {
    return weights->n_slots ? weights->slots[slot_of(weights, tensor)] : NULL;
}

/* Rebuild the index by tensor. Called for each claimed tensor that is loaded and for each graph of a context's
 * creation. There are at most about a thousand entries. */
static bool index_tensors(llmaas_weights * weights) {
    if (weights->n_slots < 2 * weights->n_entries) {
        size_t n_slots = 64;
        while (n_slots < 2 * weights->n_capacity) {
            n_slots *= 2;
        }
        llmaas_weight ** slots = realloc(weights->slots, n_slots * sizeof *slots);
        if (!slots) {
            return false;
        }
        weights->slots   = slots;
        weights->n_slots = n_slots;
    }
    memset(weights->slots, 0, weights->n_slots * sizeof *weights->slots);
    for (size_t i = 0; i < weights->n_entries; i++) {
        if (weights->entries[i]->tensor) {
            weights->slots[slot_of(weights, weights->entries[i]->tensor)] = weights->entries[i];
        }
    }
    return true;
}

void llmaas_weights_begin_change(llmaas_weights * weights) {
    pthread_rwlock_wrlock(&weights->lock);
    pthread_mutex_lock(&weights->changing.mutex);
}

void llmaas_weights_end_change(llmaas_weights * weights) {
    pthread_mutex_unlock(&weights->changing.mutex);
    pthread_rwlock_unlock(&weights->lock);
}

void llmaas_weights_lock(llmaas_weights * weights) { pthread_rwlock_rdlock(&weights->lock); }
void llmaas_weights_unlock(llmaas_weights * weights) { pthread_rwlock_unlock(&weights->lock); }

/* -- called by engines --------------------------------------------------------------------------------------------- */

bool llmaas_weights_are_cut(const llmaas_weights * weights, int32_t level) {
    const int32_t bit = level < LLMAAS_MAX_LEVELS ? level : LLMAAS_MAX_LEVELS - 1;
    return level >= 0 && (weights->changed_levels >> bit & 1);
}

bool llmaas_weights_change(const llmaas_weights * weights, int32_t level) {
    return weights->own_buffers || llmaas_weights_are_cut(weights, level);
}

llmaas_stream * llmaas_weights_stream(const llmaas_weights * weights) { return weights->stream; }

llmaas_status llmaas_weights_set_memory(llmaas_weights * weights, uint64_t n_kept, uint64_t n_arena) {
    if (!weights->stream) {
        return LLMAAS_EINVAL;
    }
    llmaas_stream_set_memory(weights->stream, n_kept, n_arena);
    return LLMAAS_OK;
}

bool llmaas_weights_try_set_memory(llmaas_weights * weights, uint64_t n_kept, uint64_t n_arena) {
    return !weights->stream || llmaas_stream_try_set_memory(weights->stream, n_kept, n_arena);
}

/* At a level that is not there, nothing is used. */
llmaas_status llmaas_weights_keep_level(llmaas_weights * weights, int32_t level) {
    if (!weights->stream) {
        return LLMAAS_EINVAL;
    }
    llmaas_weights_begin_change(weights);
    for (size_t i = 0; i < weights->n_entries; i++) {
        llmaas_weight * weight = weights->entries[i];
        if (weight->source == &llmaas_source_file && weight->tensor) {
            const llmaas_extent used = level < 0 ? (llmaas_extent) {0} : llmaas_weight_extent(weight, level);
            llmaas_file_keep_first(weight, used.n_rows, used.n_columns);
        }
    }
    llmaas_weights_end_change(weights);
    return LLMAAS_OK;
}

llmaas_status llmaas_weights_set_reading(llmaas_weights * weights, const llmaas_reading * reading) {
    if (!weights->stream || reading->depth > LLMAAS_IO_MAX_DEPTH || reading->n_bytes > LLMAAS_MAX_READ_BYTES ||
        reading->n_bytes % READ_ALIGN != 0) {
        return LLMAAS_EINVAL;
    }
    return llmaas_stream_set_reading(weights->stream, reading) ? LLMAAS_OK : LLMAAS_ESPACE;
}

/* Add what lookups have read, and waits for them. Another thread may add entries meanwhile: it holds this mutex, but
 * graphs that compute do not, so nobody waits for a graph. */
static void add_lookups(llmaas_weights * weights, llmaas_stream_stats * stats) {
    pthread_mutex_lock(&weights->changing.mutex);
    for (size_t i = 0; i < weights->n_entries; i++) {
        if (weights->entries[i]->lookup) {
            const llmaas_lookup_stats of = llmaas_lookup_read_stats(weights->entries[i]->lookup);
            stats->n_read += of.n_read;
            stats->stalled_ns += of.stalled_ns;
        }
    }
    pthread_mutex_unlock(&weights->changing.mutex);
}

void llmaas_weights_read_stats(llmaas_weights * weights, llmaas_stream_stats * stats) {
    *stats = (llmaas_stream_stats) {0};
    if (weights && weights->stream) {
        llmaas_stream_read_stats(weights->stream, stats);
        add_lookups(weights, stats);
    }
}

bool llmaas_weights_are_void(const llmaas_weights * weights) { return weights->changing.is_void; }
bool llmaas_weights_own_buffers(const llmaas_weights * weights) { return weights->own_buffers; }

void llmaas_weights_loaded(llmaas_weights * weights, const struct ggml_tensor * tensor) {
    llmaas_weights_begin_change(weights);
    llmaas_weight * weight = llmaas_weights_by_name(weights, tensor->name);
    if (weight && weight->source->load) {
        weight->tensor = tensor;
        if (!index_tensors(weights)) {
            weight->tensor = NULL; /* no graph would find it; problem() reports it */
        }
    }
    llmaas_weights_end_change(weights);
}

/* -- the weights that a context uses ----------------------------------------------------------------------------- */

/* Weights of a layer by what they read. If several read the same, the first one in a graph is tapped. */
static const struct reader {
    llmaas_tap_kind kind;
    const char *    suffix;
} readers[] = {
    {LLMAAS_TAP_ATTN_INPUT, "attn_q.weight"},
    {LLMAAS_TAP_ATTN_INPUT, "attn_k.weight"},
    {LLMAAS_TAP_ATTN_INPUT, "attn_v.weight"},
    {LLMAAS_TAP_ATTN_INPUT, "attn_qkv.weight"},
    {LLMAAS_TAP_ATTN_RESULT, "attn_output.weight"},
    {LLMAAS_TAP_FFN_INPUT, "ffn_gate_inp.weight"},
    {LLMAAS_TAP_FFN_INPUT, "ffn_gate.weight"},
    {LLMAAS_TAP_FFN_INPUT, "ffn_up.weight"},
    {LLMAAS_TAP_FFN_INPUT, "ffn_gate_exps.weight"},
    {LLMAAS_TAP_FFN_INPUT, "ffn_up_exps.weight"},
    {LLMAAS_TAP_FFN_INPUT, "ffn_gate_up_exps.weight"},
    {LLMAAS_TAP_FFN_MIDDLE, "ffn_down.weight"},
};

static bool is_tapped(const llmaas_weights * weights, int kind, int layer) {
    for (size_t i = 0; i < weights->n_entries; i++) {
        if (weights->entries[i]->tap_kind == kind && weights->entries[i]->tap_layer == layer) {
            return true;
        }
    }
    return false;
}

/* Return whether taps may want this weight's operand; if so, set its kind and layer. */
static bool operand(const char * name, int * kind, int * layer) {
    if (strcmp(name, "output.weight") == 0 || strcmp(name, "token_embd.weight") == 0) {
        *kind  = LLMAAS_TAP_FINAL_NORM;
        *layer = -1;
        return true;
    }
    int end = 0;
    if (sscanf(name, "blk.%d.%n", layer, &end) != 1 || end == 0) {
        return false;
    }
    for (size_t i = 0; i < sizeof readers / sizeof *readers; i++) {
        if (strcmp(name + end, readers[i].suffix) == 0) {
            *kind = (int) readers[i].kind;
            return true;
        }
    }
    return false;
}

static void note(llmaas_weights * weights, const struct ggml_tensor * tensor) {
    int        kind, layer;
    const bool tappable = operand(tensor->name, &kind, &layer) && !is_tapped(weights, kind, layer);
    llmaas_weight * weight =
        tappable ? llmaas_weights_entry(weights, tensor->name) : llmaas_weights_by_name(weights, tensor->name);
    if (!weight) {
        return;
    }
    weight->tensor  = tensor;
    weight->is_used = true;
    if (tappable) {
        weight->tap_kind  = kind;
        weight->tap_layer = layer;
    }
}

static void note_lookup(llmaas_weights * weights, const struct ggml_tensor * tensor) {
    llmaas_weight * weight = llmaas_weights_by_name(weights, tensor->name);
    if (weight && weight->lookup) {
        weight->is_used = true;
    }
}

void llmaas_weights_note(llmaas_weights * weights, struct ggml_cgraph * graph) {
    llmaas_weights_begin_change(weights);
    for (int i = 0; i < graph->n_nodes; i++) {
        const struct ggml_tensor * node = graph->nodes[i];
        if (llmaas_is_product(node) && node->src[0]->buffer &&
            ggml_backend_buffer_get_usage(node->src[0]->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
            note(weights, node->src[0]);
        }
        if (llmaas_op_of(node) == LLMAAS_OP_GET_ROWS) {
            note_lookup(weights, node->src[0]);
        }
    }
    const bool is_indexed = index_tensors(weights);
    for (size_t i = 0; i < weights->n_entries && !is_indexed; i++) {
        weights->entries[i]->is_used = false; /* no graph would find it; problem() reports it */
    }
    llmaas_weights_end_change(weights);
}

/* Return why a claim is not met, in words that follow the weight's name; NULL if no problem is known. */
static const char * problem(const llmaas_weight * weight, bool is_created) {
    if (weight->source->load && !weight->tensor) {
        return "is claimed, but was not loaded into our buffers";
    }
    if (is_created && !weight->is_used) {
        return "is claimed, but no graph multiplies with it on this backend";
    }
    if (weight->biases && weight->tensor && ggml_nrows(weight->tensor) != weight->n_biases) {
        return "is claimed with biases of another number of rows";
    }
    if (weight->tensor && !llmaas_weight_adapters_fit(weight)) {
        return "is claimed with adapters of another shape";
    }
    return is_created || weight->source->load ? weight->source->problem(weight) : NULL;
}

const char * llmaas_weights_problem(llmaas_weights * weights, bool is_created) {
    const char * found = NULL;
    llmaas_weights_begin_change(weights);
    for (size_t i = 0; i < weights->n_entries && !found; i++) {
        const llmaas_weight * weight = weights->entries[i];
        const char *          what   = weight->is_claimed ? problem(weight, is_created) : NULL;
        if (what) {
            snprintf(weights->problem, sizeof weights->problem, "%s %s", weight->name, what);
            found = weights->problem;
        }
    }
    llmaas_weights_end_change(weights);
    return found;
}
