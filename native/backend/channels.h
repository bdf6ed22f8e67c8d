/* Sparse products: of a matrix, only the channels (columns) that the largest values of the activation are multiplied with, which
 * memory holds as far as they were used often of late, and a file has all of (ActiveFlow, sections 3 and 4).
 *
 * Matrices that read the same activation have the same active channels. So a channel of such an operand is the columns of all of
 * them, behind each other. */
#ifndef LLMAAS_CHANNELS_H
#define LLMAAS_CHANNELS_H

#include "graph.h"
#include "llmaas/engine.h"

#include <stdbool.h>

typedef struct llmaas_channels llmaas_channels; /* of a model */
typedef struct llmaas_operand  llmaas_operand;  /* an activation of a layer */

/* A matrix as an operand's channels have it. */
typedef struct llmaas_columns {
    llmaas_operand * operand;
    uint32_t         n_bits;
    size_t           offset;   /* in a channel */
    uint32_t         n_scales; /* rows, and what fills them up */
    const uint16_t * scales;   /* F16 [n_channels / 32][n_scales] */
    const uint16_t * mins;     /* likewise; NULL: there are none */
} llmaas_columns;

typedef struct llmaas_channel_stats {
    uint32_t n_operands;
    uint64_t n_bytes;   /* of all channels that have slots */
    uint64_t n_kept;    /* of slots that have memory */
    uint64_t n_passing; /* of memory that channels without a slot, and reads, take */
    uint64_t n_read;    /* so far */
    uint64_t n_wasted;  /* of them, read ahead in vain */
    uint64_t n_hits, n_misses; /* active channels that were there, and that had to be read */
    uint64_t n_preloads; /* of the latter, those that had been read ahead */
    uint64_t stalled_ns;
} llmaas_channel_stats;

/* Of a stream, which lives longer; n_ahead: as llmaas_channels_set_ahead(). NULL: memory. */
struct llmaas_stream;
llmaas_channels * llmaas_channels_new(struct llmaas_stream * stream, const llmaas_reading * reading, uint64_t n_ahead);
void              llmaas_channels_free(llmaas_channels * channels);

/* An operand whose channels are in fd; lives as long as `channels`. predictor: NULL, or one that predicts it. Outside of graphs.
 * NULL: memory. */
llmaas_operand * llmaas_channels_add(
    llmaas_channels * channels, int fd, const llmaas_operand_spec * spec, llmaas_operand * predictor);
/* Whether `predictor` can predict such an operand beside those that it does. */
bool             llmaas_operand_predicts(const llmaas_operand * predictor, int fd, const llmaas_operand_spec * spec);
uint32_t         llmaas_operand_width(const llmaas_operand * operand);

/* How those are read that are not streamed; outside of graphs. False: memory. */
bool llmaas_channels_set_reading(llmaas_channels * channels, const llmaas_reading * reading);
/* Bytes of slots, and of memory that channels are read ahead to; outside of graphs. */
void                 llmaas_channels_set_memory(llmaas_channels * channels, uint64_t n_bytes);
void                 llmaas_channels_set_ahead(llmaas_channels * channels, uint64_t n_bytes);
llmaas_channel_stats llmaas_channels_read_stats(const llmaas_channels * channels);

/* Around a graph. */
void llmaas_channels_begin(llmaas_channels * channels, llmaas_graph * graph);
void llmaas_channels_end(llmaas_channels * channels);

/* Whether `node` is a product that its operand's active channels stand for: MUL_MAT for one token. */
bool llmaas_columns_fit(const struct ggml_tensor * node);
/* Append the product of active columns in place of `node`. False: memory. */
bool llmaas_columns_multiply(const llmaas_columns * columns, llmaas_graph * graph, struct ggml_tensor * node);

#endif
