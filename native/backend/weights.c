/* The weight table. */
#include "weights.h"

#include "../src/grow.h"
#include "llmaas/io.h"
#include "llmaas/sparse.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_CHANNELS = 1 << 20, MAX_CHANNEL_BYTES = 1 << 26, READ_ALIGN = 4096 };

/* A model file that weights are read from. */
struct file {
    char * path;
    int    fd;
};

/* An operand whose channels weights have. */
struct read_operand {
    llmaas_operand * channels;
    uint32_t         n_bytes; /* of a channel */
};

struct llmaas_weights {
    atomic_uint      n_holders;
    pthread_rwlock_t lock;
    llmaas_weight ** entries;
    size_t           n_entries;
    size_t           n_capacity;
    llmaas_weight ** slots; /* open addressing by tensor; n_slots is a power of two, at most half full */
    size_t           n_slots;
    uint32_t         n_narrow[LLMAAS_MAX_LEVELS]; /* weights that are not all, or biased, by level */
    _Atomic uint64_t narrow_levels; /* bit l: there are some at level l */
    bool             own_buffers;
    struct file *    files;
    size_t           n_files;
    llmaas_stream *  stream;
    struct read_operand * operands;
    size_t           n_operands, operands_capacity;
    char             problem[192];
};

/* Contexts that compute without a pause hold the lock between them all the time: one that is being created must come
 * before the next graph. */
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

llmaas_weights * llmaas_weights_new(void) {
    llmaas_weights * weights = calloc(1, sizeof *weights);
    if (weights && !init_lock(&weights->lock)) {
        free(weights);
        return NULL;
    }
    if (weights) {
        weights->n_holders = 1;
    }
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
    pthread_rwlock_destroy(&weights->lock);
    free(weights);
}

static llmaas_weight * by_name(const llmaas_weights * weights, const char * name) {
    for (size_t i = 0; i < weights->n_entries; i++) {
        if (strcmp(weights->entries[i]->name, name) == 0) {
            return weights->entries[i];
        }
    }
    return NULL;
}

/* The entry of this name, made if there is none; NULL: memory, or a name no tensor can have. */
static llmaas_weight * entry(llmaas_weights * weights, const char * name) {
    llmaas_weight * found = by_name(weights, name);
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

/* -- by tensor --------------------------------------------------------------------------------------------------- */

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

/* Entries whose tensor is known, by tensor: anew for each claimed tensor that is loaded, and for each graph of a context's
 * creation. There are a thousand entries at most. */
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

void llmaas_weights_lock(llmaas_weights * weights) { pthread_rwlock_rdlock(&weights->lock); }
void llmaas_weights_unlock(llmaas_weights * weights) { pthread_rwlock_unlock(&weights->lock); }

/* -- claims ------------------------------------------------------------------------------------------------------ */

static bool are_extents(const int64_t * extents, uint32_t n_levels) {
    bool are = n_levels >= 1 && n_levels <= LLMAAS_MAX_LEVELS;
    for (uint32_t level = 0; are && level < n_levels; level++) {
        are = extents[level] >= LLMAAS_ALL;
    }
    return are;
}

/* Count it anew where graphs must be rewritten. */
static void count_narrow(llmaas_weights * weights, llmaas_weight * weight) {
    uint64_t narrow_levels = 0;
    for (uint32_t level = 0; level < LLMAAS_MAX_LEVELS; level++) {
        const int64_t  extent    = weight->extents[level < weight->n_levels ? level : weight->n_levels - 1];
        const uint32_t is_narrow = extent != LLMAAS_ALL || (weight->biased_levels >> level & 1);
        weights->n_narrow[level] += is_narrow - (uint32_t) (weight->narrow_levels >> level & 1);
        narrow_levels |= (uint64_t) (weights->n_narrow[level] > 0) << level;
        weight->narrow_levels = (weight->narrow_levels & ~(1ull << level)) | (uint64_t) is_narrow << level;
    }
    weights->narrow_levels = narrow_levels;
}

static void set_extents(llmaas_weights * weights, llmaas_weight * weight, const int64_t * extents, uint32_t n_levels) {
    weight->n_levels = n_levels;
    memcpy(weight->extents, extents, n_levels * sizeof *extents);
    count_narrow(weights, weight);
}

llmaas_status llmaas_weights_claim_part(
    llmaas_weights * weights, const char * name, llmaas_axis axis, const int64_t * extents, uint32_t n_levels) {
    if (!are_extents(extents, n_levels)) {
        return LLMAAS_EINVAL;
    }
    pthread_rwlock_wrlock(&weights->lock);
    llmaas_weight * weight = entry(weights, name);
    const bool      is_new = weight && !weight->part;
    if (is_new) {
        weight->part       = axis == LLMAAS_ROWS ? &llmaas_part_rows : &llmaas_part_columns;
        weight->is_claimed = true;
        set_extents(weights, weight, extents, n_levels);
    }
    pthread_rwlock_unlock(&weights->lock);
    return is_new ? LLMAAS_OK : LLMAAS_EINVAL;
}

llmaas_status llmaas_weights_set_part(
    llmaas_weights * weights, const char * name, const int64_t * extents, uint32_t n_levels) {
    if (!weights || !are_extents(extents, n_levels)) {
        return LLMAAS_EINVAL;
    }
    pthread_rwlock_wrlock(&weights->lock);
    llmaas_weight * weight = by_name(weights, name);
    const bool      is_one = weight && weight->part;
    if (is_one) {
        set_extents(weights, weight, extents, n_levels);
    }
    pthread_rwlock_unlock(&weights->lock);
    return is_one ? LLMAAS_OK : LLMAAS_EINVAL;
}

static void note_biased_levels(llmaas_weight * weight) {
    for (uint32_t level = 0; level < LLMAAS_MAX_LEVELS; level++) {
        const uint32_t row = level < weight->n_bias_levels ? level : weight->n_bias_levels - 1;
        for (uint32_t i = 0; i < weight->n_biases; i++) {
            weight->biased_levels |= (uint64_t) (weight->biases[(size_t) row * weight->n_biases + i] != 0.0f) << level;
        }
    }
}

llmaas_status llmaas_weights_claim_biases(
    llmaas_weights * weights, const char * name, const float * biases, uint32_t n_levels, uint32_t n_rows) {
    if (n_levels < 1 || n_levels > LLMAAS_MAX_LEVELS || n_rows < 1) {
        return LLMAAS_EINVAL;
    }
    pthread_rwlock_wrlock(&weights->lock);
    llmaas_weight * weight = by_name(weights, name);
    const bool      is_new = weight && weight->part == &llmaas_part_columns && !weight->biases;
    float *         copy   = is_new ? malloc(sizeof *copy * n_levels * n_rows) : NULL;
    if (copy) {
        weight->biases        = memcpy(copy, biases, sizeof *copy * n_levels * n_rows);
        weight->n_bias_levels = n_levels;
        weight->n_biases      = n_rows;
        note_biased_levels(weight);
        count_narrow(weights, weight);
    }
    pthread_rwlock_unlock(&weights->lock);
    return copy ? LLMAAS_OK : is_new ? LLMAAS_ESPACE : LLMAAS_EINVAL;
}

const float * llmaas_weight_biases(const llmaas_weight * weight, int32_t level) {
    const uint32_t at = level < LLMAAS_MAX_LEVELS ? (uint32_t) level : LLMAAS_MAX_LEVELS - 1;
    if (level < 0 || !(weight->biased_levels >> at & 1)) {
        return NULL;
    }
    return weight->biases + (size_t) (at < weight->n_bias_levels ? at : weight->n_bias_levels - 1) * weight->n_biases;
}

static llmaas_status claim_source(
    llmaas_weights * weights, const char * name, const llmaas_source_ops * source, void * state) {
    pthread_rwlock_wrlock(&weights->lock);
    llmaas_weight * weight = entry(weights, name);
    const bool      is_new = weight && weight->source == &llmaas_source_in_place && !weight->tensor;
    if (is_new) {
        weight->source       = source;
        weight->state        = state;
        weight->is_claimed   = true;
        weights->own_buffers = true;
    }
    pthread_rwlock_unlock(&weights->lock);
    return is_new ? LLMAAS_OK : LLMAAS_EINVAL;
}

llmaas_status llmaas_weights_claim_tiles(llmaas_weights * weights, const char * name) {
    return claim_source(weights, name, &llmaas_source_tiles, NULL);
}

/* Descriptor of the model file at `path`, opened once; -1: errno says why. Past the page cache where the file system
 * can: what is read for each graph must not drive other data out of memory. */
static int descriptor(llmaas_weights * weights, const char * path) {
    for (size_t i = 0; i < weights->n_files; i++) {
        if (strcmp(weights->files[i].path, path) == 0) {
            return weights->files[i].fd;
        }
    }
    struct file * files = realloc(weights->files, (weights->n_files + 1) * sizeof *files);
    if (!files) {
        return -1;
    }
    weights->files = files;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd < 0 && errno == EINVAL) {
        fd = open(path, O_RDONLY | O_CLOEXEC);
    }
    char * copy = fd < 0 ? NULL : strdup(path);
    if (!copy) {
        if (fd >= 0) {
            close(fd);
        }
        return -1;
    }
    files[weights->n_files++] = (struct file) {copy, fd};
    return fd;
}

llmaas_status llmaas_weights_claim_file(
    llmaas_weights * weights, const char * name, const char * path, uint64_t offset, bool is_packed) {
    pthread_rwlock_wrlock(&weights->lock);
    const int fd = descriptor(weights, path);
    weights->stream = weights->stream ? weights->stream : llmaas_stream_new();
    pthread_rwlock_unlock(&weights->lock);
    if (fd < 0) {
        return LLMAAS_EIO;
    }
    void * state = weights->stream ? llmaas_file_state(weights->stream, fd, offset, is_packed) : NULL;
    if (!state) {
        return LLMAAS_ESPACE;
    }
    const llmaas_status status = claim_source(weights, name, &llmaas_source_file, state);
    if (status != LLMAAS_OK) {
        free(state);
    }
    return status;
}

/* The bytes are dropped: the file has them. */
static bool drop(llmaas_weight * weight, const void * bytes) {
    (void) weight, (void) bytes;
    return true;
}

static const char * is_looked_up(const llmaas_weight * weight) {
    (void) weight;
    return NULL;
}

const llmaas_source_ops llmaas_source_rows = {.load = drop, .problem = is_looked_up};

static llmaas_status look_up(llmaas_weights * weights, const char * name, int fd, uint64_t offset) {
    llmaas_weight * weight = entry(weights, name);
    if (!weight || weight->lookup || weight->tensor || weight->source == &llmaas_source_tiles) {
        return LLMAAS_EINVAL;
    }
    weights->stream = weights->stream ? weights->stream : llmaas_stream_new(); /* graphs take turns by it */
    weight->lookup  = weights->stream ? llmaas_lookup_new(fd, offset) : NULL;
    if (!weight->lookup) {
        return LLMAAS_ESPACE;
    }
    weight->source       = weight->source == &llmaas_source_in_place ? &llmaas_source_rows : weight->source;
    weight->is_claimed   = true;
    weights->own_buffers = true;
    return LLMAAS_OK;
}

llmaas_status llmaas_weights_claim_rows(llmaas_weights * weights, const char * name, const char * path, uint64_t offset) {
    pthread_rwlock_wrlock(&weights->lock);
    const int           fd     = descriptor(weights, path);
    const llmaas_status status = fd < 0 ? LLMAAS_EIO : look_up(weights, name, fd, offset);
    pthread_rwlock_unlock(&weights->lock);
    return status;
}

/* -- channels ---------------------------------------------------------------------------------------------------- */

static bool is_permutation(const uint32_t * order, uint32_t n) {
    bool * is_there = calloc(n, sizeof *is_there);
    bool   ok       = is_there != NULL;
    for (uint32_t i = 0; ok && i < n; i++) {
        ok = order[i] < n && !is_there[order[i]];
        if (ok) {
            is_there[order[i]] = true;
        }
    }
    free(is_there);
    return ok;
}

static bool is_sound(const llmaas_operand_spec * spec) {
    return spec->n_channels > 0 && spec->n_channels % LLMAAS_BLOCK_COLUMNS == 0 && spec->n_channels <= MAX_CHANNELS &&
           spec->n_bytes > 0 && spec->n_bytes <= MAX_CHANNEL_BYTES && spec->stride >= spec->n_bytes &&
           spec->stride <= INT64_MAX / MAX_CHANNELS / 2 && spec->offset <= INT64_MAX / 2 && spec->threshold >= 0 &&
           (spec->cache != LLMAAS_CHANNELS_STREAMED || spec->stride == spec->n_bytes) &&
           (unsigned) spec->cache <= LLMAAS_CHANNELS_RECENT && spec->n_top <= spec->n_channels && is_permutation(spec->order, spec->n_channels);
}

static llmaas_status add_operand(
    llmaas_weights * weights, const char * path, const llmaas_operand_spec * spec, uint32_t * number) {
    const int fd = descriptor(weights, path);
    if (fd < 0) {
        return LLMAAS_EIO;
    }
    llmaas_operand * predictor = spec->predictor >= 0 ? weights->operands[spec->predictor].channels : NULL;
    if (predictor && !llmaas_operand_predicts(predictor, fd, spec)) {
        return LLMAAS_EINVAL;
    }
    struct read_operand * operands =
        llmaas_grown(weights->operands, weights->n_operands, &weights->operands_capacity, sizeof *operands);
    weights->operands  = operands ? operands : weights->operands;
    llmaas_channels * channels = operands ? llmaas_stream_channels(weights->stream) : NULL;
    llmaas_operand *  added    = channels ? llmaas_channels_add(channels, fd, spec, predictor) : NULL;
    if (!added) {
        return LLMAAS_ESPACE;
    }
    *number = (uint32_t) weights->n_operands;
    weights->operands[weights->n_operands++] = (struct read_operand) {added, spec->n_bytes};
    return LLMAAS_OK;
}

llmaas_status llmaas_weights_add_operand(
    llmaas_weights * weights, const char * path, const llmaas_operand_spec * spec, uint32_t * number) {
    if (!weights->stream || !is_sound(spec)) {
        return LLMAAS_EINVAL;
    }
    pthread_rwlock_wrlock(&weights->lock);
    const bool          is_known = spec->predictor < 0 || (size_t) spec->predictor < weights->n_operands;
    const llmaas_status status   = is_known ? add_operand(weights, path, spec, number) : LLMAAS_EINVAL;
    pthread_rwlock_unlock(&weights->lock);
    return status;
}

llmaas_status llmaas_weights_add_columns(
    llmaas_weights * weights, const char * name, uint32_t number, uint32_t n_bits, uint64_t offset, uint32_t n_scales,
    const uint16_t * scales, const uint16_t * mins) {
    llmaas_status status = LLMAAS_EINVAL;
    pthread_rwlock_wrlock(&weights->lock);
    llmaas_weight * weight = by_name(weights, name);
    const uint64_t  n_bytes = (uint64_t) n_scales * n_bits / 8;
    if (weight && weight->source == &llmaas_source_file && weight->tensor && number < weights->n_operands &&
        offset <= weights->operands[number].n_bytes && n_bytes <= weights->operands[number].n_bytes - offset) {
        status = llmaas_file_columns(weight, &(llmaas_columns) {
            .operand = weights->operands[number].channels, .n_bits = n_bits, .offset = offset, .n_scales = n_scales,
            .scales = scales, .mins = mins});
    }
    pthread_rwlock_unlock(&weights->lock);
    return status;
}

bool llmaas_weights_are_cut(const llmaas_weights * weights, int32_t level) {
    const int32_t bit = level < LLMAAS_MAX_LEVELS ? level : LLMAAS_MAX_LEVELS - 1;
    return level >= 0 && (weights->narrow_levels >> bit & 1);
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

llmaas_status llmaas_weights_set_reading(llmaas_weights * weights, const llmaas_reading * reading) {
    if (!weights->stream || reading->depth > LLMAAS_IO_MAX_DEPTH || reading->n_bytes > LLMAAS_MAX_READ_BYTES ||
        reading->n_bytes % READ_ALIGN != 0) {
        return LLMAAS_EINVAL;
    }
    return llmaas_stream_set_reading(weights->stream, reading) ? LLMAAS_OK : LLMAAS_ESPACE;
}

void llmaas_weights_read_stats(llmaas_weights * weights, llmaas_stream_stats * stats) {
    *stats = (llmaas_stream_stats) {0};
    if (weights && weights->stream) {
        llmaas_stream_read_stats(weights->stream, stats);
        for (size_t i = 0; i < weights->n_entries; i++) {
            stats->n_read += weights->entries[i]->lookup ? llmaas_lookup_read(weights->entries[i]->lookup) : 0;
        }
    }
}

bool llmaas_weights_own_buffers(const llmaas_weights * weights) { return weights->own_buffers; }

void llmaas_weights_loaded(llmaas_weights * weights, const struct ggml_tensor * tensor) {
    pthread_rwlock_wrlock(&weights->lock);
    llmaas_weight * weight = by_name(weights, tensor->name);
    if (weight && weight->source->load) {
        weight->tensor = tensor;
        if (!index_tensors(weights)) {
            weight->tensor = NULL; /* no graph would find it; problem() tells */
        }
    }
    pthread_rwlock_unlock(&weights->lock);
}

/* -- what a context multiplies ----------------------------------------------------------------------------------- */

/* Weights of a layer by what they read. Of those that read the same, the first in a graph is tapped. */
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

/* Whether taps may want what this weight is multiplied with. */
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
    int             kind, layer;
    const bool      tappable = operand(tensor->name, &kind, &layer) && !is_tapped(weights, kind, layer);
    llmaas_weight * weight   = tappable ? entry(weights, tensor->name) : by_name(weights, tensor->name);
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
    llmaas_weight * weight = by_name(weights, tensor->name);
    if (weight && weight->lookup) {
        weight->is_used = true;
    }
}

void llmaas_weights_note(llmaas_weights * weights, struct ggml_cgraph * graph) {
    pthread_rwlock_wrlock(&weights->lock);
    for (int i = 0; i < graph->n_nodes; i++) {
        const struct ggml_tensor * node = graph->nodes[i];
        if ((node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID) && node->src[0]->buffer &&
            ggml_backend_buffer_get_usage(node->src[0]->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
            note(weights, node->src[0]);
        }
        if (node->op == GGML_OP_GET_ROWS) {
            note_lookup(weights, node->src[0]);
        }
    }
    const bool is_indexed = index_tensors(weights);
    for (size_t i = 0; i < weights->n_entries && !is_indexed; i++) {
        weights->entries[i]->is_used = false; /* no graph would find it; problem() tells */
    }
    pthread_rwlock_unlock(&weights->lock);
}

/* Why a claim is not met, in words that follow the weight's name; NULL: it is, as far as that is known. */
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
    return is_created || weight->source->load ? weight->source->problem(weight) : NULL;
}

const char * llmaas_weights_problem(llmaas_weights * weights, bool is_created) {
    const char * found = NULL;
    pthread_rwlock_wrlock(&weights->lock);
    for (size_t i = 0; i < weights->n_entries && !found; i++) {
        const llmaas_weight * weight = weights->entries[i];
        const char *          what   = weight->is_claimed ? problem(weight, is_created) : NULL;
        if (what) {
            snprintf(weights->problem, sizeof weights->problem, "%s %s", weight->name, what);
            found = weights->problem;
        }
    }
    pthread_rwlock_unlock(&weights->lock);
    return found;
}
