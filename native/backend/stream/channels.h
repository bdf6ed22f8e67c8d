/* Sparse products: of a matrix, use only the channels (columns) that the activation's largest values are multiplied
 * with. A file holds all channels; memory keeps those that were used often of late (ActiveFlow, sections 3 and 4).
 *
 * Matrices that read the same activation have the same active channels. So a channel of such an operand consists of the
 * columns of all these matrices, one after another. */
#ifndef LLMAAS_CHANNELS_H
#define LLMAAS_CHANNELS_H

#include "stream/operand.h"

#include <stdbool.h>

typedef struct llmaas_channels llmaas_channels; /* of a model */

/* A matrix whose columns an operand's channels contain. */
typedef struct llmaas_columns {
    llmaas_operand * operand;
    uint32_t         n_bits;
    size_t           offset;   /* of the matrix's column in a channel */
    uint32_t         n_scales; /* the matrix's rows, padded */
    const uint16_t * scales;   /* F16 [n_channels / 32][n_scales] */
    const uint16_t * mins;     /* same shape; NULL: none */
} llmaas_columns;

typedef struct llmaas_channel_stats {
    uint32_t n_operands;
    uint64_t n_bytes;   /* bytes of all channels that can have slots */
    uint64_t n_kept;    /* bytes of slots that hold memory */
    uint64_t n_passing; /* bytes of memory for reads and for channels without a slot */
    uint64_t n_read;    /* bytes read so far */
    uint64_t n_wasted;  /* bytes of n_read that were read ahead but not used */
    uint64_t n_hits, n_misses; /* active channels found in memory, and active channels not in a slot */
    uint64_t n_preloads; /* misses that had been read ahead */
    uint64_t stalled_ns;
} llmaas_channel_stats;

/* Create channels; those that are streamed become pieces of `pieces`, which must outlive them. n_ahead: see llmaas_channels_set_ahead(). NULL if out of
 * memory. */
llmaas_channels * llmaas_channels_new(llmaas_pieces * pieces, const llmaas_reading * reading, uint64_t n_ahead);
void              llmaas_channels_free(llmaas_channels * channels);

/* Add an operand whose channels are in fd; it lives as long as `channels`. predictor: the operand that predicts it, or
 * NULL. Not while a graph is computed. NULL if out of memory. */
llmaas_operand * llmaas_channels_add(
    llmaas_channels * channels, int fd, const llmaas_operand_spec * spec, llmaas_operand * predictor);
/* Set how channels that are not streamed are read; not while a graph is computed. False if out of memory. */
bool llmaas_channels_set_reading(llmaas_channels * channels, const llmaas_reading * reading);
/* Set the bytes of slots, or of memory for channels that are read ahead; not while a graph is computed. */
void                 llmaas_channels_set_memory(llmaas_channels * channels, uint64_t n_bytes);
void                 llmaas_channels_set_ahead(llmaas_channels * channels, uint64_t n_bytes);
llmaas_channel_stats llmaas_channels_read_stats(const llmaas_channels * channels);

/* Begin or end a graph. */
void llmaas_channels_begin(llmaas_channels * channels, llmaas_graph * graph);
void llmaas_channels_end(llmaas_channels * channels);

/* Return whether active channels can compute `node`: a MUL_MAT for one token. */
bool llmaas_columns_fit(const struct ggml_tensor * node);
/* Append the product of active columns in place of `node`. False if out of memory. */
bool llmaas_columns_multiply(const llmaas_columns * columns, llmaas_graph * graph, struct ggml_tensor * node);

#endif
