/* Windows of a file: many short pieces are read, neighbors in one read, into a ring of memory. They stay there until
 * released, oldest first. */
#ifndef LLMAAS_WINDOWS_H
#define LLMAAS_WINDOWS_H

#include "llmaas/engine.h"
#include "llmaas/io.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct llmaas_windows llmaas_windows;

/* A piece of a file, and where its reader wants it. */
typedef struct llmaas_gathered {
    uint64_t offset;
    uint32_t n_bytes;
    char *   to;
} llmaas_gathered;

/* Pieces that one read fetches: whole pages of the file. */
typedef struct llmaas_window {
    llmaas_io_read read;
    size_t         n_pieces;
    size_t         at; /* offset in the ring */
    uint64_t       n_used; /* bytes, counted by the reader */
} llmaas_window;

/* Create up to n_most windows, whose reads have this `is_ahead` (llmaas/io.h). `reading` must have no defaults left.
 * NULL if out of memory. */
llmaas_windows * llmaas_windows_new(const llmaas_reading * reading, size_t n_most, bool is_ahead);
void             llmaas_windows_free(llmaas_windows * windows);

/* Allocate an empty ring of n_bytes. False if out of memory; the old ring stays. */
bool   llmaas_windows_set_ring(llmaas_windows * windows, size_t n_bytes);
size_t llmaas_windows_ring(const llmaas_windows * windows);
/* Return the smallest ring that has room for a piece of n_bytes at any offset. */
size_t llmaas_windows_least_ring(const llmaas_windows * windows, uint32_t n_bytes);

/* Start one read for the first of pieces[0..n), which ascend and do not overlap. Return how many pieces it covers; 0 if
 * there is no room. *n_read grows by its bytes. */
size_t llmaas_windows_start(llmaas_windows * windows, int fd, const llmaas_gathered * pieces, size_t n, uint64_t * n_read);
/* Mark the reads that are done. */
void llmaas_windows_poll(llmaas_windows * windows);

size_t          llmaas_windows_count(const llmaas_windows * windows);
llmaas_window * llmaas_windows_at(llmaas_windows * windows, size_t i); /* the oldest is 0 */
/* Return where a piece is in the window; NULL if the window does not have it. */
const char * llmaas_window_find(const llmaas_window * window, uint64_t offset, uint32_t n_bytes);

/* Wait until the window's read is done. False if it failed. */
bool llmaas_windows_await(llmaas_windows * windows, const llmaas_window * window);
/* Release the oldest window, whose read is done. */
void llmaas_windows_release(llmaas_windows * windows);
/* Wait for all reads, and release all windows. */
void llmaas_windows_clear(llmaas_windows * windows);

#endif
