/* Loading without a copy: where the bytes of a sequence blob belong in the engine's cells. */
#ifndef LLMAAS_LANDING_H
#define LLMAAS_LANDING_H

#include "llmaas/base.h"

/* Places for the K or the V of one layer: n_pieces places of n_bytes each, `step` bytes apart. There is one place, or
 * one per channel if V is transposed. */
typedef struct llmaas_landing {
    uint8_t * first;
    uint64_t  step; /* 0 if there is one place */
    uint64_t  n_bytes;
    uint64_t  n_pieces;
} llmaas_landing;

#endif
