/* Windows of a file: many short pieces of it are read, neighbours by one read, to a ring of memory where they lie until they are
 * released, the oldest first. */
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

/* Pieces that are read together: whole pages of the file. */
typedef struct llmaas_window {
    llmaas_io_read read;
    size_t         n_pieces;
    size_t         at; /* in the ring */
    uint64_t       n_used; /* bytes, as its reader counts them */
} llmaas_window;

/* Up to n_most of them, whose reads are `is_ahead` (llmaas/io.h); nothing in `reading` is left to us. NULL: memory. */
llmaas_windows * llmaas_windows_new(const llmaas_reading * reading, size_t n_most, bool is_ahead);
void             llmaas_windows_free(llmaas_windows * windows);

/* Have a ring of n_bytes; nothing is in it. False: memory, and it is as it was. */
bool   llmaas_windows_set_ring(llmaas_windows * windows, size_t n_bytes);
size_t llmaas_windows_ring(const llmaas_windows * windows);
/* A ring that has room for a piece of n_bytes, wherever that lies. */
size_t llmaas_windows_least_ring(const llmaas_windows * windows, uint32_t n_bytes);

/* Start a read of the first of pieces[0..n), which are in rising order and do not overlap. How many of them it has; 0: there is
 * no room. *n_read grows by its bytes. */
size_t llmaas_windows_start(llmaas_windows * windows, int fd, const llmaas_gathered * pieces, size_t n, uint64_t * n_read);
/* Mark the reads that are done. */
void llmaas_windows_poll(llmaas_windows * windows);

size_t          llmaas_windows_count(const llmaas_windows * windows);
llmaas_window * llmaas_windows_at(llmaas_windows * windows, size_t i); /* the oldest is 0 */
/* Where the window has a piece. NULL: it does not have it. */
const char * llmaas_window_find(const llmaas_window * window, uint64_t offset, uint32_t n_bytes);

/* Wait until its read is done. False: it failed. */
bool llmaas_windows_await(llmaas_windows * windows, const llmaas_window * window);
/* Give up the oldest, whose read is done. */
void llmaas_windows_release(llmaas_windows * windows);
/* Wait for all reads, and give up all windows. */
void llmaas_windows_clear(llmaas_windows * windows);

#endif
