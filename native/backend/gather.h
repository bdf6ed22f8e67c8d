/* Gathering: many short pieces of a file are read to where each belongs, neighbours by one read. */
#ifndef LLMAAS_GATHER_H
#define LLMAAS_GATHER_H

#include "windows.h"

/* Memory that reads pass through, now or once there are any. */
size_t llmaas_gather_memory(const llmaas_windows * windows);

/* Read pieces[0..n), which are in rising order and do not overlap, through windows that nothing else uses. *n_read grows by the
 * bytes that were read. False: a read failed. */
bool llmaas_gather(llmaas_windows * windows, int fd, const llmaas_gathered * pieces, size_t n, uint64_t * n_read);

#endif
