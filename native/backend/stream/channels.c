#include "stream/channels_state.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    AGE        = 32, /* tokens after which use counts are halved */
    DEPTH      = 64,
    READ_BYTES = 256 << 10, /* larger reads are not faster */
    GAP_BYTES  = 12 << 10,  /* bytes that a disk of 1 to 2 GB/s reads in the time that another read costs */
};

/* -- creation and destruction ------------------------------------------------------------------------------------ */

static llmaas_reading without_defaults(const llmaas_reading * reading) {
    return (llmaas_reading) {
        .depth = reading->depth ? reading->depth : DEPTH, .n_bytes = reading->n_bytes ? reading->n_bytes : READ_BYTES,
        .n_gap = reading->n_gap >= 0 ? reading->n_gap : GAP_BYTES};
}

llmaas_channels * llmaas_channels_new(llmaas_pieces * pieces, const llmaas_reading * reading, uint64_t n_ahead) {
    llmaas_channels * channels = calloc(1, sizeof *channels);
    if (channels) {
        channels->pieces = pieces;
        channels->reading = without_defaults(reading);
        channels->n_ahead = n_ahead;
    }
    return channels;
}

static bool make_windows(llmaas_channels * channels) {
    llmaas_windows * windows = llmaas_windows_new(&channels->reading, channels->reading.depth, false);
    if (windows) {
        llmaas_windows_free(channels->windows);
        channels->windows = windows;
    }
    return windows != NULL;
}

bool llmaas_channels_set_reading(llmaas_channels * channels, const llmaas_reading * reading) {
    channels->reading = without_defaults(reading);
    if (channels->preload) {
        llmaas_preload_set_reading(channels->preload, &channels->reading);
    }
    return !channels->windows || make_windows(channels);
}

static void free_room(llmaas_channels * channels) {
    llmaas_active_free(channels->active);
    free(channels->columns);
    free(channels->missing);
    free(channels->reads);
    free(channels->copies);
    channels->active  = NULL;
    channels->columns = NULL;
    channels->missing = NULL;
    channels->reads  = NULL;
    channels->copies  = NULL;
    channels->n_room  = 0;
}

void llmaas_channels_free(llmaas_channels * channels) {
    if (!channels) {
        return;
    }
    llmaas_windows_free(channels->windows);
    llmaas_preload_free(channels->preload);
    free_room(channels);
    for (llmaas_operand * operand = channels->operands; operand;) {
        llmaas_operand * next = operand->next;
        llmaas_operand_free(operand);
        operand = next;
    }
    llmaas_pools_free(channels->pools);
    if (channels->staging) {
        munmap(channels->staging, channels->n_staging);
    }
    free(channels);
}

/* Make room for the active channels of an operand as wide as n_channels. */
static bool make_room(llmaas_channels * channels, uint32_t n_channels) {
    if (n_channels <= channels->n_room) {
        return true;
    }
    free_room(channels);
    channels->columns = calloc(n_channels, sizeof *channels->columns);
    channels->missing = calloc(n_channels, sizeof *channels->missing);
    channels->reads  = calloc(n_channels, sizeof *channels->reads);
    channels->copies  = calloc(n_channels, sizeof *channels->copies);
    if (llmaas_active_new(n_channels, &channels->active) != LLMAAS_OK || !channels->columns || !channels->missing ||
        !channels->reads || !channels->copies) {
        free_room(channels);
        return false;
    }
    channels->n_room = n_channels;
    return true;
}

static bool make_pooled(llmaas_channels * channels, llmaas_operand * operand, uint32_t number) {
    const size_t n_bytes = operand->n_channels * operand->n_bytes;
    if ((!channels->windows && !make_windows(channels)) || !llmaas_operand_share(operand, &channels->pools, number)) {
        return false;
    }
    channels->n_staging = n_bytes > channels->n_staging ? n_bytes : channels->n_staging;
    channels->stats.n_bytes += n_bytes;
    return true;
}

static bool make_preload(llmaas_channels * channels) {
    channels->preload = llmaas_preload_new();
    if (channels->preload) {
        llmaas_preload_set_reading(channels->preload, &channels->reading);
        llmaas_preload_set_memory(channels->preload, channels->n_ahead);
    }
    return channels->preload != NULL;
}

llmaas_operand * llmaas_channels_add(
    llmaas_channels * channels, int fd, const llmaas_operand_spec * spec, llmaas_operand * predictor) {
    llmaas_operand * operand     = llmaas_operand_new(channels, fd, spec);
    const bool       is_streamed = spec->cache == LLMAAS_CHANNELS_STREAMED;
    if (!operand || !make_room(channels, spec->n_channels) || (predictor && !channels->preload && !make_preload(channels)) ||
        !(is_streamed ? llmaas_operand_stream(operand, channels->pieces) : make_pooled(channels, operand, spec->pool))) {
        llmaas_operand_free(operand);
        return NULL;
    }
    if (predictor) {
        llmaas_operand_follow(operand, predictor);
    }
    channels->stats.n_operands++;
    operand->next = channels->operands;
    return channels->operands = operand;
}

/* -- memory ------------------------------------------------------------------------------------------------------ */

/* Give each pool memory for the same share of its channels. */
void llmaas_channels_set_memory(llmaas_channels * channels, uint64_t n_bytes) {
    const double share = channels->stats.n_bytes ? (double) n_bytes / (double) channels->stats.n_bytes : 0;
    for (llmaas_pool * p = channels->pools; p; p = p->next) {
        const double n = (double) (llmaas_slots_all(p->slots) / p->n_bytes);
        llmaas_slots_resize(p->slots, (size_t) (share < 1 ? share * n : n));
    }
}

void llmaas_channels_set_ahead(llmaas_channels * channels, uint64_t n_bytes) {
    channels->n_ahead = n_bytes;
    if (channels->preload) {
        llmaas_preload_set_memory(channels->preload, n_bytes);
    }
}

llmaas_channel_stats llmaas_channels_read_stats(const llmaas_channels * channels) {
    llmaas_channel_stats stats = channels->stats;
    const size_t         n_likely = channels->n_staging / 2; /* mostly, no more than half are active, and some of those
                                                            * have slots */
    if (channels->windows) {
        stats.n_passing = llmaas_gather_memory(channels->windows);
        stats.n_passing += channels->n_touched > n_likely ? channels->n_touched : n_likely;
    }
    if (channels->preload) {
        const llmaas_preload_stats preload = llmaas_preload_read_stats(channels->preload);
        stats.n_passing += llmaas_preload_memory(channels->preload);
        stats.n_read += preload.n_read;
        stats.n_wasted = preload.n_wasted;
    }
    for (const llmaas_pool * p = channels->pools; p; p = p->next) {
        stats.n_kept += llmaas_slots_kept(p->slots);
    }
    return stats;
}

/* -- products with the active channels --------------------------------------------------------------------------- */

/* Argument of the step before the products with an activation, which reads the active channels that are not in
 * memory. */
struct selection {
    llmaas_operand *           operand;
    const struct ggml_tensor * x;
};

static void select_channels(void * arg, int ith, int nth) {
    const struct selection * s        = arg;
    llmaas_channels *        channels = s->operand->of;
    (void) nth;
    if (ith != 0 || llmaas_graph_failed(channels->graph)) {
        return;
    }
    if (!llmaas_channels_select(channels, s->operand, s->x->data)) {
        llmaas_graph_fail(channels->graph);
    }
}

struct product {
    llmaas_columns       columns;
    struct ggml_tensor * node;
};

static void multiply(void * arg, int ith, int nth) {
    const struct product *  p        = arg;
    const llmaas_columns *  c        = &p->columns;
    llmaas_channels *       channels = c->operand->of;
    const uint32_t          n_rows   = (uint32_t) p->node->ne[0], n_chunks = (n_rows + LLMAAS_CHUNK_ROWS - 1) / LLMAAS_CHUNK_ROWS;
    const uint32_t begin = n_chunks * (uint32_t) ith / (uint32_t) nth * LLMAAS_CHUNK_ROWS;
    const uint32_t end   = n_chunks * ((uint32_t) ith + 1) / (uint32_t) nth * LLMAAS_CHUNK_ROWS;
    const uint32_t last  = end < n_rows ? end : n_rows;
    if (llmaas_graph_failed(channels->graph)) { /* zeros, as from the arena */
        memset((float *) p->node->data + begin, 0, begin < last ? (last - begin) * sizeof(float) : 0);
        return;
    }
    if (ith == 0) {
        llmaas_channels_submit(channels);
    }
    if (begin < end) {
        llmaas_active_multiply(channels->active, c->n_bits, channels->columns, c->offset, c->scales, c->mins, c->n_scales,
                               begin, last, p->node->data);
    }
}

bool llmaas_columns_fit(const struct ggml_tensor * node) {
    return llmaas_op_of(node) == LLMAAS_OP_MUL_MAT && ggml_nrows(node->src[1]) == 1 && node->src[1]->type == GGML_TYPE_F32;
}

bool llmaas_columns_multiply(const llmaas_columns * columns, llmaas_graph * graph, struct ggml_tensor * node) {
    llmaas_channels *    channels = columns->operand->of;
    const struct product product  = {*columns, node};
    if (channels->operand != columns->operand || channels->x != node->src[1]) {
        const struct selection selection = {columns->operand, node->src[1]};
        channels->operand = columns->operand;
        channels->x       = node->src[1];
        if (!llmaas_operand_use_pieces(columns->operand, channels->pieces) ||
            !llmaas_graph_step(graph, select_channels, &selection, sizeof selection)) {
            return false;
        }
    }
    return llmaas_graph_step(graph, multiply, &product, sizeof product);
}

/* -- begin and end of a graph ------------------------------------------------------------------------------------ */

/* Halve all use counts, so that old uses count less and less. */
static void age(llmaas_channels * channels) {
    for (llmaas_operand * operand = channels->operands; operand; operand = operand->next) {
        for (uint32_t i = 0; i < operand->n_channels && !operand->is_fixed; i++) {
            operand->channels[i].n_uses /= 2;
        }
    }
}

void llmaas_channels_begin(llmaas_channels * channels, llmaas_graph * graph) {
    channels->graph   = graph;
    channels->operand = NULL;
    channels->x       = NULL;
}

/* After a failure, forget the slots: what they should hold may not have been read. */
void llmaas_channels_end(llmaas_channels * channels) {
    for (llmaas_pool * p = channels->pools; p && llmaas_graph_failed(channels->graph); p = p->next) {
        llmaas_slots_clear(p->slots);
    }
    if (channels->preload) {
        llmaas_preload_end(channels->preload);
    }
    if (channels->operand && ++channels->n_graphs % AGE == 0) {
        age(channels);
    }
    channels->graph = NULL;
}
