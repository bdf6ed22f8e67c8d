/* Gathering: many short pieces of a file are read to where each belongs, neighbours by one read. */
#ifndef LLMAAS_GATHER_H
#define LLMAAS_GATHER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct llmaas_gather llmaas_gather;

typedef struct llmaas_gathered {
    uint64_t offset; /* in the file */
    uint32_t n_bytes;
    char *   to;
} llmaas_gathered;

/* NULL: memory. */
llmaas_gather * llmaas_gather_new(void);
void            llmaas_gather_free(llmaas_gather * gather);

/* Bytes between two pieces that are read along rather than left out, as another read takes longer. */
void llmaas_gather_set_gap(llmaas_gather * gather, uint32_t n_bytes);

/* Memory that reads pass through, now or once there are any. */
size_t llmaas_gather_memory(const llmaas_gather * gather);

/* Read pieces[0..n), which are in rising order and do not overlap. *n_read grows by the bytes that were read. False: a read
 * failed. */
bool llmaas_gather_read(llmaas_gather * gather, int fd, const llmaas_gathered * pieces, size_t n, uint64_t * n_read);

#endif
