/* An operand: where its channels are in a file, and the memory that they get. */
#ifndef LLMAAS_OPERAND_H
#define LLMAAS_OPERAND_H

#include "stream/pieces.h"
#include "stream/slots.h"

/* Slots shared by the operands with the same pool number and channel size. */
typedef struct llmaas_pool {
    struct llmaas_pool * next;
    uint32_t             number;
    size_t               n_bytes; /* bytes of a channel */
    llmaas_slots *       slots;
} llmaas_pool;

/* Streamed channels: pieces of n_each channels; each piece is where a tensor's data points. */
typedef struct llmaas_streamed {
    char *               home;
    uint32_t *           places; /* by channel, its place in the file */
    uint32_t             n_each; /* channels of a piece */
    size_t               n_pieces;
    llmaas_piece **      pieces;
    struct ggml_tensor * data; /* [n_pieces] */
} llmaas_streamed;

/* An activation of a layer. */
typedef struct llmaas_operand llmaas_operand;
struct llmaas_operand {
    llmaas_operand *  next;
    struct llmaas_channels * of;
    llmaas_pool *     pool; /* NULL: the channels are streamed */
    size_t            n_bytes; /* bytes of a channel */
    llmaas_streamed   streamed;
    int               fd;
    uint64_t          offset, stride;
    uint32_t          n_channels;
    float             threshold;
    uint32_t          n_top; /* 0: use the threshold */
    uint32_t *        order;
    bool              is_fixed; /* the first channels have slots, whatever was used of late */
    llmaas_operand *  predictor;       /* NULL: none */
    llmaas_operand *  first_predicted; /* first operand that this one predicts, in file order; NULL: none */
    llmaas_operand *  next_predicted;  /* next operand with the same predictor */
    llmaas_cached    channels[];
};

/* Create an operand whose channels have no memory yet. NULL if out of memory. */
llmaas_operand * llmaas_operand_new(struct llmaas_channels * of, int fd, const llmaas_operand_spec * spec);
void             llmaas_operand_free(llmaas_operand * operand);

/* Make the operand's channels pieces of `pieces`. On failure (out of memory, false) the pieces already
 * made stay there. */
bool llmaas_operand_stream(llmaas_operand * operand, llmaas_pieces * pieces);
/* Give the operand's channels slots in a pool; create the pool if needed. False if out of memory. */
bool llmaas_operand_share(llmaas_operand * operand, llmaas_pool ** pools, uint32_t number);
void llmaas_pools_free(llmaas_pool * pools);

/* Have `predictor` predict this operand, too. */
void llmaas_operand_follow(llmaas_operand * operand, llmaas_operand * predictor);

/* Return whether `predictor` can predict such an operand in addition to those it already predicts. */
bool     llmaas_operand_predicts(const llmaas_operand * predictor, int fd, const llmaas_operand_spec * spec);
uint32_t llmaas_operand_width(const llmaas_operand * operand);

/* Have the graph use all of the operand's pieces next. False if out of memory. */
bool llmaas_operand_use_pieces(llmaas_operand * operand, llmaas_pieces * pieces);
/* Return where a channel is while the graph uses the pieces, and whether it was kept. */
const char * llmaas_operand_streamed(const llmaas_operand * operand, uint32_t channel, bool * is_kept);

#endif
