/* Which channels a token uses, and where their columns are. */
#include "stream/channels_state.h"

#include "base/pages.h"
#include "src/clock.h"

#include <string.h>

static bool make_staging(llmaas_channels * channels) {
    channels->staging = channels->staging ? channels->staging : llmaas_pages_reserve(channels->n_staging);
    return channels->staging != NULL;
}

/* Return memory for a channel, valid until the next activation. */
static char * stage(llmaas_channels * channels, size_t n_bytes) {
    char * memory = channels->staging + channels->n_staged;
    channels->n_staged += n_bytes;
    channels->n_touched = channels->n_staged > channels->n_touched ? channels->n_staged : channels->n_touched;
    return memory;
}

/* Find the active channels that have slots. Return how many have none. */
static uint32_t find(llmaas_channels * channels, llmaas_operand * operand) {
    const llmaas_active * active    = channels->active;
    uint32_t              n_missing = 0;
    for (uint32_t i = 0; i < active->n; i++) {
        llmaas_cached * channel = &operand->channels[active->channels[i]];
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
static bool await_ahead(llmaas_channels * channels, size_t n_bytes, const llmaas_slot_copy * copies, size_t n_copies) {
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
            channels->reads[n++] = (llmaas_gathered) {offset, (uint32_t) operand->n_bytes, to};
            from                  = to;
        } else if (slot) {
            channels->copies[n_copies++] = (llmaas_slot_copy) {from, slot};
        }
        channels->columns[i - 1]   = (const uint8_t *) from;
        channels->missing[channel] = 0;
        n_missing--;
    }
    return llmaas_gather(channels->windows, operand->fd, channels->reads, n, &channels->stats.n_read) &&
           await_ahead(channels, operand->n_bytes, channels->copies, n_copies);
}

void llmaas_channels_submit(llmaas_channels * channels) {
    if (channels->preload) {
        llmaas_preload_submit(channels->preload);
    }
}

static void select_active(llmaas_channels * channels, const llmaas_operand * operand, const float * x) {
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
    if (!llmaas_slots_turn(operand->pool->slots) || !make_staging(channels)) {
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

bool llmaas_channels_select(llmaas_channels * channels, llmaas_operand * operand, const float * x) {
    select_active(channels, operand, x);
    if (!operand->pool) {
        find_streamed(channels, operand);
    } else if (!find_pooled(channels, operand)) {
        return false;
    }
    predict(channels, operand);
    llmaas_channels_submit(channels);
    return true;
}
