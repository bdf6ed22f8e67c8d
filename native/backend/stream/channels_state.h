/* The channels' members, for the files that implement them: channels.c, and channels_select.c for what a token uses. */
#ifndef LLMAAS_CHANNELS_STATE_H
#define LLMAAS_CHANNELS_STATE_H

#include "llmaas/sparse.h"
#include "stream/channels.h"
#include "stream/gather.h"
#include "stream/preload.h"

/* A channel that was read ahead and gets a slot. */
typedef struct llmaas_slot_copy {
    const char * from;
    char *       slot;
} llmaas_slot_copy;

struct llmaas_channels {
    llmaas_pieces *  pieces; /* that the operands' streamed channels are cut into */
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
    llmaas_gathered *          reads;   /* missing channels that were not read ahead */
    llmaas_slot_copy *         copies;
    uint32_t                   n_room; /* channels that the arrays above have room for */

    char * staging; /* memory for channels without a slot */
    size_t n_staging, n_staged, n_touched;

    llmaas_channel_stats stats;
};

/* Select the active channels of an operand, whose values are x[n_channels], and get their columns into memory. Then read
 * ahead for the operands that this one predicts. False if out of memory, or if a read failed. */
bool llmaas_channels_select(llmaas_channels * channels, llmaas_operand * operand, const float * x);
/* Submit the reads ahead that there is room for. */
void llmaas_channels_submit(llmaas_channels * channels);

#endif
