/* An operand: where a file has its channels, and the memory that they get. */
#ifndef LLMAAS_OPERAND_H
#define LLMAAS_OPERAND_H

#include "channels.h"
#include "slots.h"
#include "stream.h"

/* The slots that operands with the same number of a pool share. */
typedef struct llmaas_pool {
    struct llmaas_pool * next;
    uint32_t             number;
    size_t               n_bytes; /* of a channel */
    llmaas_slots *       slots;
} llmaas_pool;

/* Channels that are streamed: in pieces of so many, each where a tensor's data says. */
typedef struct llmaas_streamed {
    char *               home;
    uint32_t *           places; /* by channel, in the order of the file */
    uint32_t             n_each; /* channels of a piece */
    size_t               n_pieces;
    llmaas_piece **      pieces;
    struct ggml_tensor * data; /* [n_pieces] */
} llmaas_streamed;

struct llmaas_operand {
    llmaas_operand *  next;
    llmaas_channels * of;
    llmaas_pool *     pool; /* NULL: they are streamed */
    size_t            n_bytes; /* of a channel */
    llmaas_streamed   streamed;
    int               fd;
    uint64_t          offset, stride;
    uint32_t          n_channels;
    float             threshold;
    uint32_t          n_top; /* 0: by the threshold */
    uint32_t *        order;
    bool              is_fixed; /* the first ones have slots, not those used most often of late */
    llmaas_operand *  predictor;       /* NULL: none */
    llmaas_operand *  first_predicted; /* that it predicts, in the order of the file; NULL: none */
    llmaas_operand *  next_predicted;  /* with the same predictor */
    llmaas_channel    channels[];
};

/* One whose channels have no memory yet. NULL: memory. */
llmaas_operand * llmaas_operand_new(llmaas_channels * of, int fd, const llmaas_operand_spec * spec);
void             llmaas_operand_free(llmaas_operand * operand);

/* Its channels are pieces of `stream`, to which these belong also if there are too few in the end. False: memory. */
bool llmaas_operand_stream(llmaas_operand * operand, llmaas_stream * stream);
/* Its channels have slots in a pool, which is made if it has to be. False: memory. */
bool llmaas_operand_share(llmaas_operand * operand, llmaas_pool ** pools, uint32_t number);
void llmaas_pools_free(llmaas_pool * pools);

/* Have `predictor` predict it, too. */
void llmaas_operand_follow(llmaas_operand * operand, llmaas_operand * predictor);

/* The graph uses its pieces next. False: memory. */
bool llmaas_operand_use_pieces(llmaas_operand * operand, llmaas_stream * stream);
/* Where a channel is while it does; and whether it was kept. */
const char * llmaas_operand_streamed(const llmaas_operand * operand, uint32_t channel, bool * is_kept);

#endif
