/* The memory budget of a model's weights in files: how many bytes of pieces, experts and channels are kept. */
#ifndef LLMAAS_MEMORY_BUDGET_H
#define LLMAAS_MEMORY_BUDGET_H

#include "stream/channels.h"
#include "stream/experts.h"
#include "stream/pieces.h"

typedef struct llmaas_memory_budget {
    /* Share the budget: */
    llmaas_pieces *   pieces;
    llmaas_experts *  experts;  /* NULL: there are none */
    llmaas_channels * channels; /* NULL: there are none */

    uint64_t n_set;  /* bytes that may be kept */
    int64_t  n_more; /* bytes by which other memory has grown since that was set */
    uint64_t n_max;  /* bytes that may be kept for now: n_set, less what n_more takes */
} llmaas_memory_budget;

/* Set the bytes that may be kept. */
void llmaas_memory_budget_set(llmaas_memory_budget * budget, uint64_t n_bytes);
/* Reduce what may be kept for now, as other memory grows by n_more bytes. */
void llmaas_memory_budget_reduce(llmaas_memory_budget * budget, int64_t n_more);

/* Give pieces, experts and channels their shares, between graphs. Memory beyond a share is given back. */
void llmaas_memory_budget_apply(const llmaas_memory_budget * budget);
/* Return the pieces' share. Spare pieces get what is left when everything else is kept. */
llmaas_piece_room llmaas_memory_budget_of_pieces(const llmaas_memory_budget * budget);

#endif
