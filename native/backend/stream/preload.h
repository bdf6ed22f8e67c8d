/* Preloading: pieces of a file that are predicted to be needed soon are read while something else is computed.
 *
 * Pieces come in batches, used in the order in which they were made; until then they stay where they were read to.
 * Reads proceed only inside these calls. */
#ifndef LLMAAS_PRELOAD_H
#define LLMAAS_PRELOAD_H

#include "llmaas/engine.h"

#include <stdbool.h>

typedef struct llmaas_preload llmaas_preload;

typedef struct llmaas_preload_stats {
    uint64_t n_read;   /* bytes read so far */
    uint64_t n_wasted; /* bytes of n_read that nobody used */
} llmaas_preload_stats;

/* Create a preload. NULL if out of memory. */
llmaas_preload *     llmaas_preload_new(void);
void                 llmaas_preload_free(llmaas_preload * preload);
llmaas_preload_stats llmaas_preload_read_stats(const llmaas_preload * preload);

/* Set how pieces are read, or the bytes of memory for them; not while a graph is computed. Nothing is read ahead until
 * both are set, or if there is no such memory. `reading`: the setting for reads on demand, without defaults. */
void   llmaas_preload_set_reading(llmaas_preload * preload, const llmaas_reading * reading);
void   llmaas_preload_set_memory(llmaas_preload * preload, uint64_t n_bytes);
size_t llmaas_preload_memory(const llmaas_preload * preload); /* bytes it has, all in RAM */

/* Begin a batch of pieces of fd, identified by `key`. False if there are too many batches, one with that key exists, or
 * nothing is read ahead. */
bool llmaas_preload_begin(llmaas_preload * preload, const void * key, int fd);
/* Append a piece to the last batch. False if out of memory. */
bool llmaas_preload_want(llmaas_preload * preload, uint64_t offset, uint32_t n_bytes);
/* Start the reads that there is room for. */
void llmaas_preload_submit(llmaas_preload * preload);

/* Use the batch of this key from now on, if there is one. Its reads that have not started are dropped. Pieces found
 * before, in a batch used for the last time, become invalid. */
void llmaas_preload_use(llmaas_preload * preload, const void * key, bool is_last);
/* Return where a piece is, or will be, until the next llmaas_preload_use(). Offsets must ascend from call to call. NULL
 * if the piece was not read ahead. */
const char * llmaas_preload_find(llmaas_preload * preload, uint64_t offset, uint32_t n_bytes);
/* Wait until all pieces that were found are read. False if a read failed. */
bool         llmaas_preload_await(llmaas_preload * preload);

/* Drop all batches. */
void llmaas_preload_end(llmaas_preload * preload);

#endif
