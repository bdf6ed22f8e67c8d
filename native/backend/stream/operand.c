#include "stream/operand.h"

#include "base/pages.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

llmaas_operand * llmaas_operand_new(struct llmaas_channels * of, int fd, const llmaas_operand_spec * spec) {
    const size_t     n       = spec->n_channels;
    llmaas_operand * operand = calloc(1, sizeof *operand + n * sizeof *operand->channels);
    uint32_t *       order   = operand ? malloc(n * sizeof *order) : NULL;
    if (!order) {
        free(operand);
        return NULL;
    }
    *operand = (llmaas_operand) {
        .of = of, .n_bytes = spec->n_bytes, .fd = fd, .offset = spec->offset, .stride = spec->stride,
        .n_channels = spec->n_channels, .threshold = spec->threshold, .n_top = spec->n_top,
        .is_fixed = spec->cache == LLMAAS_CHANNELS_BUSIEST, .order = memcpy(order, spec->order, n * sizeof *order)};
    return operand;
}

void llmaas_operand_free(llmaas_operand * operand) {
    if (!operand) {
        return;
    }
    if (operand->streamed.home) {
        munmap(operand->streamed.home, operand->n_channels * operand->n_bytes);
    }
    free(operand->streamed.places);
    free(operand->streamed.pieces);
    free(operand->streamed.data);
    free(operand->order);
    free(operand);
}

uint32_t llmaas_operand_width(const llmaas_operand * operand) { return operand->n_channels; }

/* -- streamed channels ------------------------------------------------------------------------------------------- */

bool llmaas_operand_stream(llmaas_operand * operand, llmaas_pieces * pieces) {
    const size_t n = operand->n_channels, n_fit = LLMAAS_PIECE_BYTES / operand->n_bytes, n_each = n_fit ? n_fit : 1;
    llmaas_streamed * s = &operand->streamed;
    *s = (llmaas_streamed) {
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
        s->pieces[i] = llmaas_pieces_add(pieces, &(llmaas_piece) {
            .fd = operand->fd, .offset = operand->offset + begin, .n_bytes = n_left < n_piece ? n_left : n_piece,
            .home = s->home + begin});
        ok = s->pieces[i] != NULL;
    }
    return ok;
}

/* The step that waits for the pieces comes first: pieces that are not kept are read by then, and stay. */
bool llmaas_operand_use_pieces(llmaas_operand * operand, llmaas_pieces * pieces) {
    const llmaas_streamed * s = &operand->streamed;
    size_t                  n = 0;
    for (size_t i = 0; i < s->n_pieces; i++) {
        llmaas_piece * piece = s->pieces[i];
        s->data[i].data      = piece->home;
        const llmaas_strided all = {piece->n_bytes, piece->n_bytes, piece->n_bytes};
        if (piece->is_kept) {
            llmaas_pieces_note(pieces, piece, &all);
        } else if (!llmaas_pieces_use(pieces, piece, &all, &s->data[i], n++)) {
            return false;
        }
    }
    return true;
}

const char * llmaas_operand_streamed(const llmaas_operand * operand, uint32_t channel, bool * is_kept) {
    const llmaas_streamed * s     = &operand->streamed;
    const uint32_t          place = s->places[channel], piece = place / s->n_each;
    const char *            data  = s->data[piece].data;
    *is_kept = s->pieces[piece]->is_kept;
    return data + (size_t) (place - piece * s->n_each) * operand->n_bytes;
}

/* -- channels in slots ------------------------------------------------------------------------------------------- */

static llmaas_pool * pool_of(llmaas_pool ** pools, uint32_t number, size_t n_bytes) {
    for (llmaas_pool * pool = *pools; pool; pool = pool->next) {
        if (pool->number == number && pool->n_bytes == n_bytes) {
            return pool;
        }
    }
    llmaas_pool * made = calloc(1, sizeof *made);
    if (!made) {
        return NULL;
    }
    *made = (llmaas_pool) {.next = *pools, .number = number, .n_bytes = n_bytes, .slots = llmaas_slots_new(n_bytes)};
    if (!made->slots) {
        free(made);
        return NULL;
    }
    return *pools = made;
}

void llmaas_pools_free(llmaas_pool * pools) {
    while (pools) {
        llmaas_pool * next = pools->next;
        llmaas_slots_free(pools->slots);
        free(pools);
        pools = next;
    }
}

/* Return a use count that stands for the rank of channel i of n in the file: earlier channels get more. */
static uint32_t rank(size_t i, size_t n) { return (uint32_t) ((n - i) * LLMAAS_SLOTS_COUNTS / n); }

bool llmaas_operand_share(llmaas_operand * operand, llmaas_pool ** pools, uint32_t number) {
    const size_t n = operand->n_channels;
    operand->pool  = pool_of(pools, number, operand->n_bytes);
    if (!operand->pool) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        operand->channels[operand->order[i]] = (llmaas_cached) {-1, operand->is_fixed ? rank(i, n) : 0};
    }
    llmaas_slots_expect(operand->pool->slots, n);
    return true;
}

/* -- predicted operands ------------------------------------------------------------------------------------------ */

/* Several predicted operands must lie in the same records, one after another. */
bool llmaas_operand_predicts(const llmaas_operand * predictor, int fd, const llmaas_operand_spec * spec) {
    const llmaas_operand * first = predictor->first_predicted, * last = first;
    if (spec->cache == LLMAAS_CHANNELS_STREAMED || spec->n_channels != predictor->n_channels) {
        return false;
    }
    while (last && last->next_predicted) {
        last = last->next_predicted;
    }
    return !first || (fd == first->fd && spec->stride == first->stride && spec->offset >= last->offset + last->n_bytes &&
                      spec->offset + spec->n_bytes <= first->offset + first->stride &&
                      memcmp(spec->order, first->order, spec->n_channels * sizeof *first->order) == 0);
}

void llmaas_operand_follow(llmaas_operand * operand, llmaas_operand * predictor) {
    llmaas_operand ** end = &predictor->first_predicted;
    while (*end) {
        end = &(*end)->next_predicted;
    }
    *end               = operand;
    operand->predictor = predictor;
}
