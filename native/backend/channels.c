#include "channels.h"

#include "../src/clock.h"
#include "gather.h"
#include "llmaas/sparse.h"
#include "pages.h"
#include "slots.h"
#include "stream.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    AGE        = 32, /* tokens after which uses count half */
    DEPTH      = 64,
    READ_BYTES = 256 << 10, /* more does not read faster */
    GAP_BYTES  = 12 << 10,  /* what a disk of 1 to 2 GB/s reads while it gets another read on its way */
};

/* The slots that operands with the same `pool` share. */
typedef struct pool {
    struct pool *  next;
    uint32_t       number;
    size_t         n_bytes; /* of a channel */
    llmaas_slots * slots;
} pool;

/* Channels that are streamed: in pieces of so many, each where a tensor's data says. */
typedef struct streamed {
    char *               home;
    uint32_t *           places; /* by channel, in the order of the file */
    uint32_t             n_each; /* channels of a piece */
    size_t               n_pieces;
    llmaas_piece **      pieces;
    struct ggml_tensor * data; /* [n_pieces] */
} streamed;

struct llmaas_operand {
    llmaas_operand *  next;
    llmaas_channels * of;
    pool *            pool; /* NULL: they are streamed */
    size_t            n_bytes; /* of a channel */
    streamed          streamed;
    int               fd;
    uint64_t          offset, stride;
    uint32_t          n_channels;
    float             threshold;
    uint32_t          n_top; /* 0: by the threshold */
    uint32_t *        order;
    bool              is_fixed; /* the first ones have slots, not those used most often of late */
    llmaas_channel    channels[];
};

struct llmaas_channels {
    llmaas_stream *  stream; /* whose they are */
    llmaas_graph *   graph;
    llmaas_reading   reading;
    llmaas_windows * windows; /* that they are read through on demand; NULL: all are streamed */
    llmaas_operand * operands;
    pool *           pools;
    uint64_t         n_graphs;

    /* of the activation that was read last */
    const llmaas_operand *     operand;
    const struct ggml_tensor * x;
    llmaas_active *            active;
    const uint8_t **           columns; /* of active channels */
    uint32_t *                 missing; /* by channel: 1 + its place among the active ones; else 0 */
    llmaas_gathered *          pieces;
    uint32_t                   n_room; /* channels that all these have room for */

    char * stage; /* channels without a slot */
    size_t n_stage, n_staged, n_touched;

    llmaas_channel_stats stats;
};

/* -- life -------------------------------------------------------------------------------------------------------- */

static llmaas_reading without_defaults(const llmaas_reading * reading) {
    return (llmaas_reading) {
        .depth = reading->depth ? reading->depth : DEPTH, .n_bytes = reading->n_bytes ? reading->n_bytes : READ_BYTES,
        .n_gap = reading->n_gap >= 0 ? reading->n_gap : GAP_BYTES};
}

llmaas_channels * llmaas_channels_new(struct llmaas_stream * stream, const llmaas_reading * reading) {
    llmaas_channels * channels = calloc(1, sizeof *channels);
    if (channels) {
        channels->stream  = stream;
        channels->reading = without_defaults(reading);
    }
    return channels;
}

static bool make_windows(llmaas_channels * channels) {
    llmaas_windows * windows = llmaas_windows_new(&channels->reading, channels->reading.depth);
    if (windows) {
        llmaas_windows_free(channels->windows);
        channels->windows = windows;
    }
    return windows != NULL;
}

bool llmaas_channels_set_reading(llmaas_channels * channels, const llmaas_reading * reading) {
    channels->reading = without_defaults(reading);
    return !channels->windows || make_windows(channels);
}

static void free_room(llmaas_channels * channels) {
    llmaas_active_free(channels->active);
    free(channels->columns);
    free(channels->missing);
    free(channels->pieces);
    channels->active  = NULL;
    channels->columns = NULL;
    channels->missing = NULL;
    channels->pieces  = NULL;
    channels->n_room  = 0;
}

static void free_operand(llmaas_operand * operand) {
    if (operand->streamed.home) {
        munmap(operand->streamed.home, operand->n_channels * operand->n_bytes);
    }
    free(operand->streamed.places);
    free(operand->streamed.pieces);
    free(operand->streamed.data);
    free(operand->order);
    free(operand);
}

void llmaas_channels_free(llmaas_channels * channels) {
    if (!channels) {
        return;
    }
    llmaas_windows_free(channels->windows);
    free_room(channels);
    for (llmaas_operand * operand = channels->operands; operand;) {
        llmaas_operand * next = operand->next;
        free_operand(operand);
        operand = next;
    }
    for (pool * p = channels->pools; p;) {
        pool * next = p->next;
        llmaas_slots_free(p->slots);
        free(p);
        p = next;
    }
    if (channels->stage) {
        munmap(channels->stage, channels->n_stage);
    }
    free(channels);
}

static pool * pool_of(llmaas_channels * channels, uint32_t number, size_t n_bytes) {
    for (pool * p = channels->pools; p; p = p->next) {
        if (p->number == number && p->n_bytes == n_bytes) {
            return p;
        }
    }
    pool * made = calloc(1, sizeof *made);
    if (!made) {
        return NULL;
    }
    *made = (pool) {.next = channels->pools, .number = number, .n_bytes = n_bytes, .slots = llmaas_slots_new(n_bytes)};
    if (!made->slots) {
        free(made);
        return NULL;
    }
    return channels->pools = made;
}

/* Room for the active channels of the widest operand. */
static bool make_room(llmaas_channels * channels, uint32_t n_channels) {
    if (n_channels <= channels->n_room) {
        return true;
    }
    free_room(channels);
    channels->columns = calloc(n_channels, sizeof *channels->columns);
    channels->missing = calloc(n_channels, sizeof *channels->missing);
    channels->pieces  = calloc(n_channels, sizeof *channels->pieces);
    if (llmaas_active_new(n_channels, &channels->active) != LLMAAS_OK || !channels->columns || !channels->missing ||
        !channels->pieces) {
        free_room(channels);
        return false;
    }
    channels->n_room = n_channels;
    return true;
}

/* What stands for the uses of channel i of the n in the file: those in front have more. */
static uint32_t rank(size_t i, size_t n) { return (uint32_t) ((n - i) * LLMAAS_SLOTS_COUNTS / n); }

/* The pieces belong to the stream, also if there are too few in the end. */
static bool make_streamed(llmaas_operand * operand) {
    const size_t n = operand->n_channels, n_fit = LLMAAS_PIECE_BYTES / operand->n_bytes, n_each = n_fit ? n_fit : 1;
    streamed *   s = &operand->streamed;
    *s = (streamed) {
        .home = llmaas_pages_reserve(n * operand->n_bytes), .places = malloc(n * sizeof *s->places),
        .n_each = (uint32_t) n_each, .n_pieces = (n + n_each - 1) / n_each};
    s->pieces = calloc(s->n_pieces, sizeof *s->pieces);
    s->data   = calloc(s->n_pieces, sizeof *s->data);
    bool ok   = s->home && s->places && s->pieces && s->data;
    for (uint32_t i = 0; ok && i < n; i++) {
        s->places[operand->order[i]] = i;
    }
    for (size_t i = 0; ok && i < s->n_pieces; i++) {
        const size_t begin = i * n_each * operand->n_bytes, n_left = n * operand->n_bytes - begin;
        const size_t n_piece = n_each * operand->n_bytes;
        s->pieces[i] = llmaas_stream_add(operand->of->stream, &(llmaas_piece) {
            .fd = operand->fd, .offset = operand->offset + begin, .n_bytes = n_left < n_piece ? n_left : n_piece,
            .home = s->home + begin});
        ok = s->pieces[i] != NULL;
    }
    return ok;
}

static bool make_pooled(llmaas_channels * channels, llmaas_operand * operand, uint32_t number) {
    const size_t n = operand->n_channels, n_bytes = n * operand->n_bytes;
    operand->pool = pool_of(channels, number, operand->n_bytes);
    if (!operand->pool || (!channels->windows && !make_windows(channels))) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        operand->channels[operand->order[i]] = (llmaas_channel) {-1, operand->is_fixed ? rank(i, n) : 0};
    }
    llmaas_slots_expect(operand->pool->slots, n);
    channels->n_stage = n_bytes > channels->n_stage ? n_bytes : channels->n_stage;
    channels->stats.n_bytes += n_bytes;
    return true;
}

llmaas_operand * llmaas_channels_add(llmaas_channels * channels, int fd, const llmaas_operand_spec * spec) {
    const size_t     n       = spec->n_channels;
    llmaas_operand * operand = calloc(1, sizeof *operand + n * sizeof *operand->channels);
    uint32_t *       order   = operand ? malloc(n * sizeof *order) : NULL;
    if (!order) {
        free(operand);
        return NULL;
    }
    *operand = (llmaas_operand) {
        .next = channels->operands, .of = channels, .n_bytes = spec->n_bytes, .fd = fd, .offset = spec->offset,
        .stride = spec->stride, .n_channels = spec->n_channels, .threshold = spec->threshold, .n_top = spec->n_top,
        .is_fixed = spec->cache == LLMAAS_CHANNELS_BUSIEST, .order = memcpy(order, spec->order, n * sizeof *order)};
    const bool is_streamed = spec->cache == LLMAAS_CHANNELS_STREAMED;
    if (!make_room(channels, spec->n_channels) ||
        !(is_streamed ? make_streamed(operand) : make_pooled(channels, operand, spec->pool))) {
        free_operand(operand);
        return NULL;
    }
    channels->stats.n_operands++;
    return channels->operands = operand;
}

uint32_t llmaas_operand_width(const llmaas_operand * operand) { return operand->n_channels; }

/* -- memory ------------------------------------------------------------------------------------------------------ */

/* Each pool gets the same share of its channels. */
void llmaas_channels_set_memory(llmaas_channels * channels, uint64_t n_bytes) {
    const double share = channels->stats.n_bytes ? (double) n_bytes / (double) channels->stats.n_bytes : 0;
    for (pool * p = channels->pools; p; p = p->next) {
        const double n = (double) (llmaas_slots_all(p->slots) / p->n_bytes);
        llmaas_slots_resize(p->slots, (size_t) (share < 1 ? share * n : n));
    }
}

llmaas_channel_stats llmaas_channels_read_stats(const llmaas_channels * channels) {
    llmaas_channel_stats stats = channels->stats;
    const size_t         n_likely = channels->n_stage / 2; /* no more are active, mostly, and some of them have slots */
    if (channels->windows) {
        stats.n_passing = llmaas_gather_memory(channels->windows);
        stats.n_passing += channels->n_touched > n_likely ? channels->n_touched : n_likely;
    }
    for (const pool * p = channels->pools; p; p = p->next) {
        stats.n_kept += llmaas_slots_kept(p->slots);
    }
    return stats;
}

static bool make_stage(llmaas_channels * channels) {
    channels->stage = channels->stage ? channels->stage : llmaas_pages_reserve(channels->n_stage);
    return channels->stage != NULL;
}

/* Memory for a channel that is not there: a slot, or room until the next activation. */
static char * memory_for(llmaas_channels * channels, const llmaas_operand * operand, llmaas_channel * channel) {
    char * memory = llmaas_slots_take(operand->pool->slots, channel);
    if (!memory) {
        memory = channels->stage + channels->n_staged;
        channels->n_staged += operand->n_bytes;
        channels->n_touched = channels->n_staged > channels->n_touched ? channels->n_staged : channels->n_touched;
    }
    return memory;
}

/* -- an activation ----------------------------------------------------------------------------------------------- */

/* Before the products with an activation: its active channels are read where they are not there. */
struct selection {
    llmaas_operand *           operand;
    const struct ggml_tensor * x;
};

/* Where the active channels are that are there; how many are not. */
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

/* Read the others, in the file's order. */
static bool fetch(llmaas_channels * channels, llmaas_operand * operand, uint32_t n_missing) {
    size_t n = 0;
    for (uint32_t at = 0; n < n_missing; at++) {
        const uint32_t channel = operand->order[at], i = channels->missing[channel];
        if (i > 0) {
            char * to                 = memory_for(channels, operand, &operand->channels[channel]);
            channels->missing[channel] = 0;
            channels->columns[i - 1]   = (const uint8_t *) to;
            channels->pieces[n++]      = (llmaas_gathered) {
                operand->offset + at * operand->stride, (uint32_t) operand->n_bytes, to};
        }
    }
    return llmaas_gather(channels->windows, operand->fd, channels->pieces, n, &channels->stats.n_read);
}

static void select_channels(llmaas_channels * channels, const llmaas_operand * operand, const float * x) {
    channels->active->n_channels = operand->n_channels;
    if (operand->n_top > 0) {
        llmaas_active_top(channels->active, x, operand->n_top);
    } else {
        llmaas_active_above(channels->active, x, operand->threshold);
    }
}

/* All are there by now. */
static void find_streamed(llmaas_channels * channels, const llmaas_operand * operand) {
    const streamed * s = &operand->streamed;
    for (uint32_t i = 0; i < channels->active->n; i++) {
        const uint32_t place = s->places[channels->active->channels[i]], piece = place / s->n_each;
        const char *   data  = s->data[piece].data;
        channels->columns[i] = (const uint8_t *) data + (size_t) (place - piece * s->n_each) * operand->n_bytes;
        *(s->pieces[piece]->is_kept ? &channels->stats.n_hits : &channels->stats.n_misses) += 1;
    }
}

static bool find_pooled(llmaas_channels * channels, llmaas_operand * operand) {
    channels->n_staged = 0;
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
    }
}

struct product {
    llmaas_columns       columns;
    struct ggml_tensor * node;
};

static void multiply(void * arg, int ith, int nth) {
    const struct product *  p        = arg;
    const llmaas_columns *  c        = &p->columns;
    const llmaas_channels * channels = c->operand->of;
    const uint32_t          n_rows   = (uint32_t) p->node->ne[0], n_chunks = (n_rows + LLMAAS_CHUNK_ROWS - 1) / LLMAAS_CHUNK_ROWS;
    const uint32_t begin = n_chunks * (uint32_t) ith / (uint32_t) nth * LLMAAS_CHUNK_ROWS;
    const uint32_t end   = n_chunks * ((uint32_t) ith + 1) / (uint32_t) nth * LLMAAS_CHUNK_ROWS;
    if (begin < end && !llmaas_graph_failed(channels->graph)) {
        llmaas_active_multiply(channels->active, c->n_bits, channels->columns, c->offset, c->scales, c->mins, c->n_scales,
                               begin, end < n_rows ? end : n_rows, p->node->data);
    }
}

bool llmaas_columns_fit(const struct ggml_tensor * node) {
    return node->op == GGML_OP_MUL_MAT && ggml_nrows(node->src[1]) == 1 && node->src[1]->type == GGML_TYPE_F32;
}

/* Those of its pieces that are not kept are read by then, and stay. */
static bool use_pieces(const llmaas_operand * operand) {
    const streamed * s = &operand->streamed;
    size_t           n = 0;
    for (size_t i = 0; i < s->n_pieces; i++) {
        s->data[i].data = s->pieces[i]->home;
        if (!s->pieces[i]->is_kept && !llmaas_stream_use(operand->of->stream, s->pieces[i], s->pieces[i]->n_bytes, &s->data[i], n++)) {
            return false;
        }
    }
    return true;
}

bool llmaas_columns_multiply(const llmaas_columns * columns, llmaas_graph * graph, struct ggml_tensor * node) {
    llmaas_channels *    channels = columns->operand->of;
    const struct product product  = {*columns, node};
    if (channels->operand != columns->operand || channels->x != node->src[1]) {
        const struct selection selection = {columns->operand, node->src[1]};
        channels->operand = columns->operand;
        channels->x       = node->src[1];
        if (!use_pieces(columns->operand) || !llmaas_graph_step(graph, have_channels, &selection, sizeof selection)) {
            return false;
        }
    }
    return llmaas_graph_step(graph, multiply, &product, sizeof product);
}

/* -- a graph ----------------------------------------------------------------------------------------------------- */

/* What was used long ago counts less and less. */
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

/* What was to be read is not there after a failure. */
void llmaas_channels_end(llmaas_channels * channels) {
    for (pool * p = channels->pools; p && llmaas_graph_failed(channels->graph); p = p->next) {
        llmaas_slots_clear(p->slots);
    }
    if (channels->operand && ++channels->n_graphs % AGE == 0) {
        age(channels);
    }
    channels->graph = NULL;
}
