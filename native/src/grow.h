/* Growable arrays. */
#ifndef LLMAAS_GROW_H
#define LLMAAS_GROW_H

#include <stddef.h>
#include <stdlib.h>

/* Return the array of n elements with room for one more, moved if needed. NULL if out of memory; the array is then
 * unchanged. */
static inline void * llmaas_grown(void * array, size_t n, size_t * capacity, size_t size) {
    if (n < *capacity) {
        return array;
    }
    const size_t wider = *capacity ? 2 * *capacity : 64;
    void *       moved = realloc(array, wider * size);
    *capacity          = moved ? wider : *capacity;
    return moved;
}

#endif
