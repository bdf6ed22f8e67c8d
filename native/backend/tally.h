/* What shipped taps of activations have in common: numbers that are added up by layer, row after row. Thread 0 counts a
 * node's rows alone, under the mutex that readers hold: sums do not depend on the number of threads then. */
#ifndef LLMAAS_TALLY_H
#define LLMAAS_TALLY_H

#include "llmaas/tap.h"

#include <pthread.h>

/* A layer's numbers; what they are its tap knows. Zeros at first. */
typedef struct llmaas_tallied {
    uint32_t n_channels;
    uint64_t n_rows;
    double   numbers[];
} llmaas_tallied;

typedef struct llmaas_tally {
    llmaas_tap_kind kind;
    int             n_layers;
    /* Add a row's first n values, n <= n_channels: a level may have left the others out. */
    void (*count)(llmaas_tallied * layer, const float * row, uint32_t n);
    pthread_mutex_t   mutex;  /* guards the layers' numbers */
    llmaas_tallied ** layers; /* NULL: not counted */
} llmaas_tally;

/* n_channels[n_layers]: values of a row; 0: the layer is not counted. A layer has n_fixed numbers, and n_each for each of
 * its channels. False: out of memory, another kind than activations', or no layers; then there is nothing to end. */
bool llmaas_tally_init(
    llmaas_tally * tally, llmaas_tap_kind kind, uint32_t n_layers, const uint32_t * n_channels, size_t n_fixed,
    size_t n_each);
void llmaas_tally_end(llmaas_tally * tally);

/* A tap that counts rows of the layers' number of channels, or fewer. */
llmaas_tap llmaas_tally_tap(llmaas_tally * tally);

/* NULL: it is not counted. */
llmaas_tallied * llmaas_tally_layer(const llmaas_tally * tally, int layer);

#endif
