#include "stream/channels.h"

#include "base/pages.h"
#include "llmaas/sparse.h"
#include "src/clock.h"
#include "stream/gather.h"
#include "stream/operand.h"
#include "stream/preload.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    AGE        = 32, /* tokens after which use counts are halved */
    DEPTH      = 64,
    READ_BYTES = 256 << 10, /* larger reads are not faster */
    GAP_BYTES  = 12 << 10,  /* bytes that a disk of 1 to 2 GB/s reads in the time that another read costs */
};

/* A channel that was read ahead and gets a slot. */
typedef struct slot_copy {
    const char * from;
    char *       slot;
} slot_copy;

struct llmaas_channels {
    llmaas_stream *  stream; /* that the channels belong to */
    llmaas_graph *   graph;
    llmaas_reading   reading;
    llmaas_windows * windows; /* for reads on demand; NULL: all channels are streamed */
    llmaas_preload * preload; /* NULL: no operand is predicted */
    uint64_t         n_ahead; /* bytes that may be read ahead */
    llmaas_operand * operands;
    llmaas_pool *    pools;
    uint64_t         n_graphs;

    /* State of the last activation: */
    const llmaas_operand *     operand;
    const struct ggml_tensor * x;
    llmaas_active *            active;
    const uint8_t **           columns; /* bytes of each active channel */
    uint32_t *                 missing; /* by channel: 1 + its index among the active ones; 0: not missing */
    llmaas_gathered *          pieces; /* to read */
    slot_copy *                copies;
    uint32_t                   n_room; /* channels that the arrays above have room for */

    char * stage; /* memory for channels without a slot */
    size_t n_stage, n_staged, n_touched;

    llmaas_channel_stats stats;
};

/* -- creation and destruction ------------------------------------------------------------------------------------ */

static llmaas_reading without_defaults(const llmaas_reading * reading) {
    return (llmaas_reading) {
        .depth = reading->depth ? reading->depth : DEPTH, .n_bytes = reading->n_bytes ? reading->n_bytes : READ_BYTES,
        .n_gap = reading->n_gap >= 0 ? reading->n_gap : GAP_BYTES};
}

llmaas_channels * llmaas_channels_new(struct llmaas_stream * stream, const llmaas_reading * reading, uint64_t n_ahead) {
    llmaas_channels * channels = calloc(1, sizeof *channels);
    if (channels) {
        channels->stream  = stream;
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
    free(channels->pieces);
    free(channels->copies);
    channels->active  = NULL;
    channels->columns = NULL;
    channels->missing = NULL;
    channels->pieces  = NULL;
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
    if (channels->stage) {
        munmap(channels->stage, channels->n_stage);
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
    channels->pieces  = calloc(n_channels, sizeof *channels->pieces);
    channels->copies  = calloc(n_channels, sizeof *channels->copies);
    if (llmaas_active_new(n_channels, &channels->active) != LLMAAS_OK || !channels->columns || !channels->missing ||
        !channels->pieces || !channels->copies) {
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
    channels->n_stage = n_bytes > channels->n_stage ? n_bytes : channels->n_stage;
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
        !(is_streamed ? llmaas_operand_stream(operand, channels->stream) : make_pooled(channels, operand, spec->pool))) {
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
    const size_t         n_likely = channels->n_stage / 2; /* mostly, no more than half are active, and some of those
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

static bool make_stage(llmaas_channels * channels) {
    channels->stage = channels->stage ? channels->stage : llmaas_pages_reserve(channels->n_stage);
    return channels->stage != NULL;
}

/* Return memory for a channel, valid until the next activation. */
static char * stage(llmaas_channels * channels, size_t n_bytes) {
    char * memory = channels->stage + channels->n_staged;
    channels->n_staged += n_bytes;
    channels->n_touched = channels->n_staged > channels->n_touched ? channels->n_staged : channels->n_touched;
    return memory;
}

/* -- processing an activation ------------------------------------------------------------------------------------ */

/* Argument of the step before the products with an activation, which reads the active channels that are not in
 * memory. */
struct selection {
    llmaas_operand *           operand;
    const struct ggml_tensor * x;
};

/* Find the active channels that have slots. Return how many have none. */
static uint32_t find(llmaas_channels * channels, llmaas_operand * operand) {
    const llmaas_active * active    = channels->active;
    uint32_t              n_missing = 0;
    for (uint32_t i = 0; i < active->n; i++) {
        llmaas_channel * channel = &operand->channels[active->channels[i]];
        channel->n_uses += !operand->is_fixed;
        if (channel->slot >= 0) {
            channels->columns[i] = (const uint8_t *) llmaas_slots_use(operand->pool->slots, channel);
        } else {
            channels->missing[active->channels[i]] = i + 1;
            n_missing++;
        }
    }
    channels->stats.n_hits += active->n - n_missing;
    channels->stats.n_misses += n_missing;
    return n_missing;
}

/* Return where a channel is, or soon will be, that was read ahead; NULL if it was not. */
static const char * find_ahead(llmaas_channels * channels, const llmaas_operand * operand, uint64_t offset) {
    const char * ahead =
        channels->preload ? llmaas_preload_find(channels->preload, offset, (uint32_t) operand->n_bytes) : NULL;
    channels->stats.n_preloads += ahead != NULL;
    return ahead;
}

/* Wait for the channels that were read ahead; copy those that get a slot. */
static bool await_ahead(llmaas_channels * channels, size_t n_bytes, const slot_copy * copies, size_t n_copies) {
    if (channels->preload && !llmaas_preload_await(channels->preload)) {
        return false;
    }
    for (size_t i = 0; i < n_copies; i++) {
        memcpy(copies[i].slot, copies[i].from, n_bytes);
    }
    return true;
}

/* Get the missing channels, in file order: read those that were not read ahead. */
static bool fetch(llmaas_channels * channels, llmaas_operand * operand, uint32_t n_missing) {
    size_t n = 0, n_copies = 0;
    for (uint32_t at = 0; n_missing > 0; at++) {
        const uint32_t channel = operand->order[at], i = channels->missing[channel];
        if (i == 0) {
            continue;
        }
        const uint64_t offset = operand->offset + at * operand->stride;
        char *         slot   = llmaas_slots_take(operand->pool->slots, &operand->channels[channel]);
        const char *   from   = find_ahead(channels, operand, offset);
        if (!from) {
            char * to             = slot ? slot : stage(channels, operand->n_bytes);
            channels->pieces[n++] = (llmaas_gathered) {offset, (uint32_t) operand->n_bytes, to};
            from                  = to;
        } else if (slot) {
            channels->copies[n_copies++] = (slot_copy) {from, slot};
        }
        channels->columns[i - 1]   = (const uint8_t *) from;
        channels->missing[channel] = 0;
        n_missing--;
    }
    return llmaas_gather(channels->windows, operand->fd, channels->pieces, n, &channels->stats.n_read) &&
           await_ahead(channels, operand->n_bytes, channels->copies, n_copies);
}

/* Keep reading ahead. */
static void pump(llmaas_channels * channels) {
    if (channels->preload) {
        llmaas_preload_pump(channels->preload);
    }
}

static void select_channels(llmaas_channels * channels, const llmaas_operand * operand, const float * x) {
    channels->active->n_channels = operand->n_channels;
    if (operand->n_top > 0) {
        llmaas_active_top(channels->active, x, operand->n_top);
    } else {
        llmaas_active_above(channels->active, x, operand->threshold);
    }
}

/* Find streamed channels, which are all in memory by now. */
static void find_streamed(llmaas_channels * channels, const llmaas_operand * operand) {
    for (uint32_t i = 0; i < channels->active->n; i++) {
        bool is_kept;
        channels->columns[i] = (const uint8_t *) llmaas_operand_streamed(operand, channels->active->channels[i], &is_kept);
        *(is_kept ? &channels->stats.n_hits : &channels->stats.n_misses) += 1;
    }
}

static bool find_pooled(llmaas_channels * channels, llmaas_operand * operand) {
    channels->n_staged = 0;
    if (channels->preload) {
        llmaas_preload_use(channels->preload, operand->predictor, !operand->next_predicted);
    }
    if (!llmaas_slots_turn(operand->pool->slots) || !make_stage(channels)) {
        channels->active->n = 0;
        return false;
    }
    const uint32_t n_missing = find(channels, operand);
    if (n_missing == 0) {
        return true;
    }
    const uint64_t started = llmaas_now_ns();
    const bool     ok      = fetch(channels, operand, n_missing);
    channels->stats.stalled_ns += llmaas_now_ns() - started;
    return ok;
}

/* Read ahead the active channels for the operands that this one predicts: they are likely to be active there, too. */
static void predict(llmaas_channels * channels, const llmaas_operand * operand) {
    const llmaas_operand * first  = operand->first_predicted;
    const llmaas_active *  active = channels->active;
    if (!first || !llmaas_preload_begin(channels->preload, operand, first->fd)) {
        return;
    }
    for (uint32_t i = 0; i < active->n; i++) {
        channels->missing[active->channels[i]] = 1;
    }
    uint32_t n_left = active->n;
    for (uint32_t at = 0; n_left > 0; at++) {
        const uint32_t channel = first->order[at];
        if (channels->missing[channel] == 0) {
            continue;
        }
        for (const llmaas_operand * o = first; o; o = o->next_predicted) {
            if (o->channels[channel].slot < 0) {
                llmaas_preload_want(channels->preload, o->offset + at * o->stride, (uint32_t) o->n_bytes);
            }
        }
        channels->missing[channel] = 0;
        n_left--;
    }
}

static void have_channels(void * arg, int ith, int nth) {
    const struct selection * s        = arg;
    llmaas_channels *        channels = s->operand->of;
    (void) nth;
    if (ith != 0 || llmaas_graph_failed(channels->graph)) {
        return;
    }
    select_channels(channels, s->operand, s->x->data);
    if (!s->operand->pool) {
        find_streamed(channels, s->operand);
    } else if (!find_pooled(channels, s->operand)) {
        llmaas_graph_fail(channels->graph);
        return;
    }
    predict(channels, s->operand);
    pump(channels);
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
    if (llmaas_graph_failed(channels->graph)) {
        return;
    }
    if (ith == 0) {
        pump(channels);
    }
    if (begin < end) {
        llmaas_active_multiply(channels->active, c->n_bits, channels->columns, c->offset, c->scales, c->mins, c->n_scales,
                               begin, end < n_rows ? end : n_rows, p->node->data);
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
        if (!llmaas_operand_use_pieces(columns->operand, channels->stream) ||
            !llmaas_graph_step(graph, have_channels, &selection, sizeof selection)) {
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
