/* Common part of the shipped taps of activations: numbers that are added up by layer, row after row. Thread 0 alone
 * counts a node's rows, under the lock that readers hold, so sums do not depend on the number of threads. */
#ifndef LLMAAS_ACCUMULATOR_H
#define LLMAAS_ACCUMULATOR_H

#include "base/fork_lock.h"
#include "llmaas/tap.h"

/* A layer's numbers, zeros at first. Their meaning is up to the tap. */
typedef struct llmaas_layer_sums {
    uint32_t n_channels;
    uint64_t n_rows;
    double   numbers[];
} llmaas_layer_sums;

typedef struct llmaas_accumulator {
    llmaas_tap_kind kind;
    int             n_layers;
    /* Add a row's first n values, n <= n_channels; a level may have left out the others. */
    void (*count)(llmaas_layer_sums * layer, const float * row, uint32_t n);
    llmaas_fork_lock     lock;   /* guards the layers' numbers */
    llmaas_layer_sums ** layers; /* NULL: not counted */
} llmaas_accumulator;

/* Initialize. n_channels[n_layers]: values per row; 0: the layer is not counted. A layer has n_fixed numbers, plus
 * n_each for each channel. False if out of memory, if the kind is not one of activations, or if there are no layers;
 * then do not call llmaas_accumulator_end(). */
bool llmaas_accumulator_init(
    llmaas_accumulator * accumulator, llmaas_tap_kind kind, uint32_t n_layers, const uint32_t * n_channels, size_t n_fixed,
    size_t n_each);
void llmaas_accumulator_end(llmaas_accumulator * accumulator);

/* Return a tap that counts rows of at most the layer's number of channels. */
llmaas_tap llmaas_accumulator_tap(llmaas_accumulator * accumulator);

/* Return a layer's numbers; NULL if it is not counted. */
llmaas_layer_sums * llmaas_accumulator_layer(const llmaas_accumulator * accumulator, int layer);

#endif
