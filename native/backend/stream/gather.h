/* Gathering: reading many short pieces of a file to where each belongs, neighbors in one read. */
#ifndef LLMAAS_GATHER_H
#define LLMAAS_GATHER_H

#include "stream/windows.h"

/* Return the bytes of memory that reads pass through, now or once there are any. */
size_t llmaas_gather_memory(const llmaas_windows * windows);

/* Read pieces[0..n), which ascend and do not overlap, through windows that nothing else uses. *n_read grows by the
 * bytes read. False if a read failed. */
bool llmaas_gather(llmaas_windows * windows, int fd, const llmaas_gathered * pieces, size_t n, uint64_t * n_read);

#endif
