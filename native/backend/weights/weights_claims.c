/* Claims of plugins about weights: parts, biases, and where bytes are. */
#include "weights/weights_table.h"

#include "llmaas/sparse.h"
#include "src/grow.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_CHANNELS = 1 << 20, MAX_CHANNEL_BYTES = 1 << 26 };

/* -- parts -------------------------------------------------------------------------------------------------------- */

static bool are_extents(const int64_t * extents, uint32_t n_levels) {
    bool are = n_levels >= 1 && n_levels <= LLMAAS_MAX_LEVELS;
    for (uint32_t level = 0; are && level < n_levels; level++) {
        are = extents[level] >= LLMAAS_ALL;
    }
    return are;
}

void llmaas_weights_count_changed(llmaas_weights * weights, llmaas_weight * weight) {
    uint64_t changed_levels = 0;
    for (uint32_t level = 0; level < LLMAAS_MAX_LEVELS; level++) {
        const int64_t  extent    = weight->extents[level < weight->n_levels ? level : weight->n_levels - 1];
        const uint32_t is_changed = extent != LLMAAS_ALL || (weight->biased_levels >> level & 1) ||
                                    llmaas_weight_adapter(weight, (int32_t) level);
        weights->n_changed[level] += is_changed - (uint32_t) (weight->changed_levels >> level & 1);
        changed_levels |= (uint64_t) (weights->n_changed[level] > 0) << level;
        weight->changed_levels = (weight->changed_levels & ~(1ull << level)) | (uint64_t) is_changed << level;
    }
    weights->changed_levels = changed_levels;
}

static void set_extents(llmaas_weights * weights, llmaas_weight * weight, const int64_t * extents, uint32_t n_levels) {
    weight->n_levels = n_levels;
    memcpy(weight->extents, extents, n_levels * sizeof *extents);
    llmaas_weights_count_changed(weights, weight);
}

llmaas_status llmaas_weights_claim_part(
    llmaas_weights * weights, const char * name, llmaas_axis axis, const int64_t * extents, uint32_t n_levels) {
    if (!are_extents(extents, n_levels)) {
        return LLMAAS_EINVAL;
    }
    llmaas_weights_begin_change(weights);
    llmaas_weight * weight = llmaas_weights_entry(weights, name);
    const bool      is_new = weight && !weight->part;
    if (is_new) {
        weight->part       = axis == LLMAAS_ROWS ? &llmaas_part_rows : &llmaas_part_columns;
        weight->is_claimed = true;
        set_extents(weights, weight, extents, n_levels);
    }
    llmaas_weights_end_change(weights);
    return is_new ? LLMAAS_OK : LLMAAS_EINVAL;
}

llmaas_status llmaas_weights_set_part(
    llmaas_weights * weights, const char * name, const int64_t * extents, uint32_t n_levels) {
    if (!weights || !are_extents(extents, n_levels)) {
        return LLMAAS_EINVAL;
    }
    llmaas_weights_begin_change(weights);
    llmaas_weight * weight = llmaas_weights_by_name(weights, name);
    const bool      is_one = weight && weight->part;
    if (is_one) {
        set_extents(weights, weight, extents, n_levels);
    }
    llmaas_weights_end_change(weights);
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
    llmaas_weights_begin_change(weights);
    llmaas_weight * weight = llmaas_weights_by_name(weights, name);
    const bool      is_new = weight && weight->part == &llmaas_part_columns && !weight->biases;
    float *         copy   = is_new ? malloc(sizeof *copy * n_levels * n_rows) : NULL;
    if (copy) {
        weight->biases        = memcpy(copy, biases, sizeof *copy * n_levels * n_rows);
        weight->n_bias_levels = n_levels;
        weight->n_biases      = n_rows;
        note_biased_levels(weight);
        llmaas_weights_count_changed(weights, weight);
    }
    llmaas_weights_end_change(weights);
    return copy ? LLMAAS_OK : is_new ? LLMAAS_ESPACE : LLMAAS_EINVAL;
}

const float * llmaas_weight_biases(const llmaas_weight * weight, int32_t level) {
    const uint32_t at = level < LLMAAS_MAX_LEVELS ? (uint32_t) level : LLMAAS_MAX_LEVELS - 1;
    if (level < 0 || !(weight->biased_levels >> at & 1)) {
        return NULL;
    }
    return weight->biases + (size_t) (at < weight->n_bias_levels ? at : weight->n_bias_levels - 1) * weight->n_biases;
}

/* -- sources ------------------------------------------------------------------------------------------------------ */

static llmaas_status claim_source(
    llmaas_weights * weights, const char * name, const llmaas_source_ops * source, void * state) {
    llmaas_weights_begin_change(weights);
    llmaas_weight * weight = llmaas_weights_entry(weights, name);
    const bool      is_new = weight && weight->source == &llmaas_source_in_place && !weight->tensor;
    if (is_new) {
        weight->source       = source;
        weight->state        = state;
        weight->is_claimed   = true;
        weights->own_buffers = true;
    }
    llmaas_weights_end_change(weights);
    return is_new ? LLMAAS_OK : LLMAAS_EINVAL;
}

llmaas_status llmaas_weights_claim_tiles(llmaas_weights * weights, const char * name) {
    return claim_source(weights, name, &llmaas_source_tiles, NULL);
}

/* Return a descriptor of the model file at `path`, opened once; -1 on error. It bypasses the page cache where the file
 * system allows: what is read for each graph must not evict other data. */
static int descriptor(llmaas_weights * weights, const char * path) {
    for (size_t i = 0; i < weights->n_files; i++) {
        if (strcmp(weights->files[i].path, path) == 0) {
            return weights->files[i].fd;
        }
    }
    struct llmaas_weights_file * files = realloc(weights->files, (weights->n_files + 1) * sizeof *files);
    if (!files) {
        return -1;
    }
    weights->files = files;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd < 0 && errno == EINVAL) {
        fd = open(path, O_RDONLY | O_CLOEXEC);
    }
    struct stat state;
    char *      copy = fd < 0 || fstat(fd, &state) != 0 ? NULL : strdup(path);
    if (!copy) {
        if (fd >= 0) {
            close(fd);
        }
        return -1;
    }
    files[weights->n_files++] = (struct llmaas_weights_file) {copy, fd, state};
    return fd;
}

static bool is_same(const struct stat * a, const struct stat * b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

const char * llmaas_weights_changed(llmaas_weights * weights) {
    struct stat now;
    for (size_t i = 0; i < weights->n_files; i++) {
        const struct llmaas_weights_file * file = &weights->files[i];
        if (weights->has_changed || fstat(file->fd, &now) != 0 || !is_same(&file->state, &now)) {
            weights->has_changed = true;
            return file->path;
        }
    }
    return NULL;
}

/* Open the file at `path` and make sure that there is a stream; EIO, ESPACE. Creating the stream is not part of a
 * change, since a stream has a fork lock of its own. */
static llmaas_status open_file(llmaas_weights * weights, const char * path, int * fd) {
    llmaas_weights_begin_change(weights);
    *fd = descriptor(weights, path);
    llmaas_weights_end_change(weights);
    if (*fd < 0) {
        return LLMAAS_EIO;
    }
    pthread_rwlock_wrlock(&weights->lock);
    weights->stream = weights->stream ? weights->stream : llmaas_stream_new();
    pthread_rwlock_unlock(&weights->lock);
    return weights->stream ? LLMAAS_OK : LLMAAS_ESPACE;
}

llmaas_status llmaas_weights_claim_file(
    llmaas_weights * weights, const char * name, const char * path, uint64_t offset, bool is_packed) {
    int                 fd;
    const llmaas_status opened = open_file(weights, path, &fd);
    if (opened != LLMAAS_OK) {
        return opened;
    }
    void * state = llmaas_file_state(weights->stream, fd, offset, is_packed);
    if (!state) {
        return LLMAAS_ESPACE;
    }
    const llmaas_status status = claim_source(weights, name, &llmaas_source_file, state);
    if (status != LLMAAS_OK) {
        free(state);
    }
    return status;
}

/* Drop the bytes: the file has them. */
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
    llmaas_weight * weight = llmaas_weights_entry(weights, name);
    if (!weight || weight->lookup || weight->tensor || weight->source == &llmaas_source_tiles) {
        return LLMAAS_EINVAL;
    }
    weight->lookup = llmaas_lookup_new(fd, offset);
    if (!weight->lookup) {
        return LLMAAS_ESPACE;
    }
    weight->source       = weight->source == &llmaas_source_in_place ? &llmaas_source_rows : weight->source;
    weight->is_claimed   = true;
    weights->own_buffers = true;
    return LLMAAS_OK;
}

llmaas_status llmaas_weights_claim_rows(llmaas_weights * weights, const char * name, const char * path, uint64_t offset) {
    int                 fd;
    const llmaas_status opened = open_file(weights, path, &fd); /* graphs take turns using the stream */
    if (opened != LLMAAS_OK) {
        return opened;
    }
    llmaas_weights_begin_change(weights);
    const llmaas_status status = look_up(weights, name, fd, offset);
    llmaas_weights_end_change(weights);
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

static int64_t nanoseconds(struct timespec time) {
    return (int64_t) time.tv_sec * 1000000000 + time.tv_nsec;
}

static bool has_stamp(const struct stat * state, const llmaas_file_stamp * stamp) {
    return state->st_dev == stamp->device && state->st_ino == stamp->inode && (uint64_t) state->st_size == stamp->n_bytes &&
           nanoseconds(state->st_mtim) == stamp->mtime_ns && nanoseconds(state->st_ctim) == stamp->ctime_ns;
}

/* Open the file at `path`, which must have this stamp; return its descriptor, or -1 and a status. */
static int stamped_descriptor(
    llmaas_weights * weights, const char * path, const llmaas_file_stamp * stamp, llmaas_status * status) {
    const size_t n_before = weights->n_files;
    const int    fd       = descriptor(weights, path);
    for (size_t i = 0; i < weights->n_files; i++) {
        if (weights->files[i].fd == fd && has_stamp(&weights->files[i].state, stamp)) {
            return fd;
        }
    }
    *status = fd < 0 ? LLMAAS_EIO : LLMAAS_ESTALE;
    if (weights->n_files > n_before) { /* it may be opened again later */
        close(fd);
        free(weights->files[--weights->n_files].path);
    }
    return -1;
}

static llmaas_status add_operand(
    llmaas_weights * weights, const char * path, const llmaas_file_stamp * stamp, const llmaas_operand_spec * spec,
    uint32_t * number) {
    llmaas_status status = LLMAAS_OK;
    const int     fd     = stamped_descriptor(weights, path, stamp, &status);
    if (fd < 0) {
        return status;
    }
    llmaas_operand * predictor = spec->predictor >= 0 ? weights->operands[spec->predictor].channels : NULL;
    if (predictor && !llmaas_operand_predicts(predictor, fd, spec)) {
        return LLMAAS_EINVAL;
    }
    struct llmaas_weights_operand * operands =
        llmaas_grown(weights->operands, weights->n_operands, &weights->operands_capacity, sizeof *operands);
    weights->operands  = operands ? operands : weights->operands;
    llmaas_channels * channels = operands ? llmaas_stream_channels(weights->stream) : NULL;
    llmaas_operand *  added    = channels ? llmaas_channels_add(channels, fd, spec, predictor) : NULL;
    if (!added) {
        return LLMAAS_ESPACE;
    }
    *number = (uint32_t) weights->n_operands;
    weights->operands[weights->n_operands++] = (struct llmaas_weights_operand) {added, spec->n_bytes};
    return LLMAAS_OK;
}

llmaas_status llmaas_weights_add_operand(
    llmaas_weights * weights, const char * path, const llmaas_file_stamp * stamp, const llmaas_operand_spec * spec,
    uint32_t * number) {
    if (!weights->stream || !is_sound(spec)) {
        return LLMAAS_EINVAL;
    }
    llmaas_weights_begin_change(weights);
    const bool          is_known = spec->predictor < 0 || (size_t) spec->predictor < weights->n_operands;
    const llmaas_status status   = is_known ? add_operand(weights, path, stamp, spec, number) : LLMAAS_EINVAL;
    llmaas_weights_end_change(weights);
    return status;
}

llmaas_status llmaas_weights_add_columns(
    llmaas_weights * weights, const char * name, uint32_t number, uint32_t n_bits, uint64_t offset, uint32_t n_scales,
    const uint16_t * scales, const uint16_t * mins) {
    llmaas_status status = LLMAAS_EINVAL;
    llmaas_weights_begin_change(weights);
    llmaas_weight * weight = llmaas_weights_by_name(weights, name);
    const uint64_t  n_bytes = (uint64_t) n_scales * n_bits / 8;
    if (weight && weight->source == &llmaas_source_file && weight->tensor && number < weights->n_operands &&
        offset <= weights->operands[number].n_bytes && n_bytes <= weights->operands[number].n_bytes - offset) {
        status = llmaas_file_columns(weight, &(llmaas_columns) {
            .operand = weights->operands[number].channels, .n_bits = n_bits, .offset = offset, .n_scales = n_scales,
            .scales = scales, .mins = mins});
    }
    llmaas_weights_end_change(weights);
    if (status == LLMAAS_OK) {
        llmaas_file_spare(weight);
    }
    return status;
}
