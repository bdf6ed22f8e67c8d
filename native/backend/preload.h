/* Preloading: pieces of a file that will be needed soon, as far as can be told, are read while something else is computed.
 *
 * They come in batches, which are used in the order in which they are made, and until then lie where they were read to. Nothing
 * is read behind the caller's back. */
#ifndef LLMAAS_PRELOAD_H
#define LLMAAS_PRELOAD_H

#include "llmaas/engine.h"

#include <stdbool.h>

typedef struct llmaas_preload llmaas_preload;

typedef struct llmaas_preload_stats {
    uint64_t n_read;   /* bytes so far */
    uint64_t n_wasted; /* of them, those that nobody has used */
} llmaas_preload_stats;

/* NULL: memory. */
llmaas_preload *     llmaas_preload_new(void);
void                 llmaas_preload_free(llmaas_preload * preload);
llmaas_preload_stats llmaas_preload_read_stats(const llmaas_preload * preload);

/* Nothing is read ahead before both are set, nor where there is no such memory; outside of graphs. `reading`: of what is read on
 * demand, nothing is left to us. */
void   llmaas_preload_set_reading(llmaas_preload * preload, const llmaas_reading * reading);
void   llmaas_preload_set_memory(llmaas_preload * preload, uint64_t n_bytes);
size_t llmaas_preload_memory(const llmaas_preload * preload); /* that it has, all of it in RAM */

/* A batch of fd, which is known by `key`. False: there are too many, one of that key, or nothing is read ahead. */
bool llmaas_preload_begin(llmaas_preload * preload, const void * key, int fd);
/* A piece of the last batch, behind those that it has. False: memory. */
bool llmaas_preload_want(llmaas_preload * preload, uint64_t offset, uint32_t n_bytes);
/* Start reads that there is room for. */
void llmaas_preload_pump(llmaas_preload * preload);

/* Use the batch of this key from now on, if there is one: what is not on its way is not read any more. What was found before in
 * another that was used for the last time is void. */
void llmaas_preload_use(llmaas_preload * preload, const void * key, bool is_last);
/* Where a piece is, or will be, until the next use. From one call to the next offsets rise. NULL: it was not read ahead. */
const char * llmaas_preload_find(llmaas_preload * preload, uint64_t offset, uint32_t n_bytes);
/* Wait until all that was found is there. False: a read failed. */
bool         llmaas_preload_await(llmaas_preload * preload);

/* Give up everything. */
void llmaas_preload_end(llmaas_preload * preload);

#endif
