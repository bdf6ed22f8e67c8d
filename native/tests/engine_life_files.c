/* Weights in files: their memory, how they are read, and sparse products with some of their columns. */
#include "engine_life.h"
#include "llmaas/sparse.h"

#include <sys/stat.h>

enum { MAX_WIDTH = 1 << 14 };

static llmaas_file_stamp stamp_of(const char * path) {
    struct stat found;
    CHECK(stat(path, &found) == 0);
    return (llmaas_file_stamp) {
        .device = found.st_dev, .inode = found.st_ino, .n_bytes = (uint64_t) found.st_size,
        .mtime_ns = (int64_t) found.st_mtim.tv_sec * 1000000000 + found.st_mtim.tv_nsec,
        .ctime_ns = (int64_t) found.st_ctim.tv_sec * 1000000000 + found.st_ctim.tv_nsec};
}

static size_t n_bytes_of(const char * path) {
    struct stat found;
    CHECK(stat(path, &found) == 0);
    return (size_t) found.st_size;
}

/* Add columns with small scales, so that results stay finite. */
static void add_columns(model * m, const llmaas_tensor_info * info, uint32_t operand, uint32_t n_bits, uint32_t n_rows) {
    const size_t n      = (size_t) info->ne[0] / LLMAAS_BLOCK_COLUMNS * n_rows;
    uint16_t *   scales = (uint16_t *) (void *) exact(2 * n * sizeof *scales);
    for (size_t i = 0; i < 2 * n; ++i) {
        scales[i] = (uint16_t) rnd_below(0x1000);
    }
    const bool has_mins = n_bits == 4 && one_in(2);
    CHECK(llmaas_weights_add_columns(m->weights, info->name, operand, n_bits, 1, n_rows, scales, NULL) == LLMAAS_EINVAL);
    CHECK(llmaas_weights_add_columns(
              m->weights, info->name, operand, n_bits, 0, n_rows, scales, has_mins ? scales + n : NULL) == LLMAAS_OK);
    free(scales);
}

/* The operand added last, if another one may follow it. */
static struct { const model * of; uint32_t n_channels, n_bytes, number; } last;

/* Add an operand. Any bytes will do, so use the start of the model file. One operand of each width is predicted by the
 * previous one. */
static void add_operand(model * m, const llmaas_tensor_info * info, llmaas_channel_cache cache) {
    static uint32_t order[MAX_WIDTH];
    const uint32_t n_bits = one_in(2) ? 4 : 8, n = (uint32_t) info->ne[0];
    const uint32_t n_rows = ((uint32_t) info->ne[1] + LLMAAS_CHUNK_ROWS - 1) / LLMAAS_CHUNK_ROWS * LLMAAS_CHUNK_ROWS;
    llmaas_operand_spec spec = {
        .pool = rnd_below(2), .n_channels = n, .n_bytes = n_rows * n_bits / 8, .stride = n_rows * n_bits / 8, .order = order,
        .cache = cache, .threshold = (float) rnd_below(3), .n_top = one_in(2) ? n / 2 : 0, .predictor = -1};
    if (info->ne[2] > 1 || n > MAX_WIDTH || (size_t) n * spec.n_bytes > n_bytes_of(m->path)) {
        return;
    }
    for (uint32_t i = 0; i < n; ++i) {
        order[i] = n - 1 - i;
    }
    const bool is_alike = last.of == m && last.n_channels == n && last.n_bytes == spec.n_bytes;
    spec.predictor = is_alike && cache != LLMAAS_CHANNELS_STREAMED ? (int32_t) last.number : -1;
    uint32_t number;
    const llmaas_file_stamp stamp = stamp_of(m->path);
    llmaas_file_stamp       other = stamp;
    other.ctime_ns++;
    CHECK(llmaas_weights_add_operand(m->weights, m->path, &other, &spec, &number) == LLMAAS_ESTALE);
    CHECK(llmaas_weights_add_operand(m->weights, m->path, &stamp, &spec, &number) == LLMAAS_OK);
    last.of         = spec.predictor < 0 ? m : NULL; /* one operand predicts only one other */
    last.n_channels = n;
    last.n_bytes    = spec.n_bytes;
    last.number     = number;
    add_columns(m, info, number, n_bits, n_rows);
}

void add_channels(model * m) {
    const llmaas_channel_cache cache = (llmaas_channel_cache) rnd_below(3);
    llmaas_tensor_info *       infos;
    uint32_t                   n;
    last.of = NULL; /* it belonged to an earlier model */
    CHECK(llmaas_gguf_tensors(m->path, &infos, &n) == LLMAAS_OK);
    for (uint32_t i = 0; i < n; ++i) {
        if (m->is_in_file[i] && strncmp(infos[i].name, "blk.", 4) == 0) {
            add_operand(m, &infos[i], cache);
        }
    }
    llmaas_gguf_tensors_free(infos);
}

bool do_budget(void) {
    model * m = any_model(true);
    if (!m || !(m->claims & FROM_FILE)) {
        return false;
    }
    llmaas_stream_stats stats;
    llmaas_weights_read_stats(m->weights, &stats);
    CHECK(stats.n_kept <= stats.n_bytes);
    const llmaas_reading reading = {rnd_below(9), 4096 * rnd_below(65), (int32_t) rnd_below(1 << 15) - 1};
    CHECK(llmaas_weights_set_reading(m->weights, &reading) == LLMAAS_OK);
    CHECK(llmaas_weights_set_memory(m->weights, rnd() % (stats.n_bytes + 1), rnd_below(8 << 20)) == LLMAAS_OK);
    return true;
}
