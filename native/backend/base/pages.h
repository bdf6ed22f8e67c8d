/* Whole pages of memory. */
#ifndef LLMAAS_PAGES_H
#define LLMAAS_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct llmaas_pages {
    uintptr_t start, end; /* equal: no pages */
} llmaas_pages;

uintptr_t llmaas_page_size(void);

/* Return the pages that lie entirely within these bytes. */
llmaas_pages llmaas_pages_in(const void * base, size_t n_bytes);

/* Count the bytes of the pages that hold memory. False if the system does not tell, or the pages are not mapped. */
bool llmaas_pages_resident(llmaas_pages pages, uint64_t * n_bytes);

/* Store for each page whether it holds memory, 1 or 0. False as above. */
bool llmaas_pages_states(llmaas_pages pages, unsigned char * are_there);

/* Reserve address space for n_bytes, to be freed with munmap(). Memory is used only where something is written. NULL on
 * failure. */
void * llmaas_pages_reserve(size_t n_bytes);

/* Give the pages' memory back; they then hold zeros. False if the system refused. */
bool llmaas_pages_release(llmaas_pages pages);

#endif
