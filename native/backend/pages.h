/* Whole pages of memory. */
#ifndef LLMAAS_PAGES_H
#define LLMAAS_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct llmaas_pages {
    uintptr_t start, end; /* alike: there are none */
} llmaas_pages;

uintptr_t llmaas_page_size(void);

/* Those that lie in these bytes as a whole. */
llmaas_pages llmaas_pages_in(const void * base, size_t n_bytes);

/* Bytes of them that hold memory. False: the system does not tell, or they are nobody's. */
bool llmaas_pages_resident(llmaas_pages pages, uint64_t * n_bytes);

/* Whether each of them holds memory, 1 or 0. False: as above. */
bool llmaas_pages_states(llmaas_pages pages, unsigned char * are_there);

/* Address space for n_bytes, for munmap(), with memory under it only where something is written. NULL: there is none. */
void * llmaas_pages_reserve(size_t n_bytes);

/* Give their memory back: they hold zeros then. False: the system refused. */
bool llmaas_pages_release(llmaas_pages pages);

#endif
