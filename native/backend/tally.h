/* Common part of the shipped taps of activations: numbers that are added up by layer, row after row. Thread 0 alone
 * counts a node's rows, under the lock that readers hold, so sums do not depend on the number of threads. */
#ifndef LLMAAS_TALLY_H
#define LLMAAS_TALLY_H

#include "forks.h"
#include "llmaas/tap.h"

/* A layer's numbers, zeros at first. Their meaning is up to the tap. */
typedef struct llmaas_tallied {
    uint32_t n_channels;
    uint64_t n_rows;
    double   numbers[];
} llmaas_tallied;

typedef struct llmaas_tally {
    llmaas_tap_kind kind;
    int             n_layers;
    /* Add a row's first n values, n <= n_channels; a level may have left out the others. */
    void (*count)(llmaas_tallied * layer, const float * row, uint32_t n);
    llmaas_fork_lock  lock;   /* guards the layers' numbers */
    llmaas_tallied ** layers; /* NULL: not counted */
} llmaas_tally;

/* Initialize. n_channels[n_layers]: values per row; 0: the layer is not counted. A layer has n_fixed numbers, plus
 * n_each for each channel. False if out of memory, if the kind is not one of activations, or if there are no layers;
 * then do not call llmaas_tally_end(). */
bool llmaas_tally_init(
    llmaas_tally * tally, llmaas_tap_kind kind, uint32_t n_layers, const uint32_t * n_channels, size_t n_fixed,
    size_t n_each);
void llmaas_tally_end(llmaas_tally * tally);

/* Return a tap that counts rows of at most the layer's number of channels. */
llmaas_tap llmaas_tally_tap(llmaas_tally * tally);

/* Return a layer's numbers; NULL if it is not counted. */
llmaas_tallied * llmaas_tally_layer(const llmaas_tally * tally, int layer);

#endif
