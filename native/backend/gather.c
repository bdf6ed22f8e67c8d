#include "gather.h"

#include "../src/ring.h"
#include "llmaas/io.h"

#include <stdlib.h>
#include <string.h>

#define PAGE 4096u

enum {
    DEPTH      = 64,
    READ_BYTES = 256 << 10, /* at most, unless a piece is longer; more does not read faster */
    RING_BYTES = 4 << 20,
    GAP_BYTES  = 12 << 10, /* what a disk of 1 to 2 GB/s reads while it gets another read on its way */
};

/* Pieces that are read together. */
typedef struct window {
    llmaas_io_read read;
    size_t         first, end; /* pieces */
    size_t         at, n_room; /* in the ring */
} window;

struct llmaas_gather {
    llmaas_io * io;
    uint32_t    gap;
    char *      ring;
    size_t      n_ring;
    window      windows[DEPTH]; /* under way, in order; a ring, too */
    size_t      first, n;
};

llmaas_gather * llmaas_gather_new(void) {
    llmaas_gather * gather = calloc(1, sizeof *gather);
    if (gather && llmaas_io_open(LLMAAS_IO_BEST, DEPTH, &gather->io) != LLMAAS_OK) {
        free(gather);
        return NULL;
    }
    if (gather) {
        gather->gap = GAP_BYTES;
    }
    return gather;
}

void llmaas_gather_free(llmaas_gather * gather) {
    if (gather) {
        llmaas_io_close(gather->io);
        llmaas_io_memory_free(gather->ring, gather->n_ring);
        free(gather);
    }
}

void   llmaas_gather_set_gap(llmaas_gather * gather, uint32_t n_bytes) { gather->gap = n_bytes; }
size_t llmaas_gather_memory(const llmaas_gather * gather) { return gather->n_ring ? gather->n_ring : RING_BYTES; }

static window * window_at(llmaas_gather * gather, size_t i) { return &gather->windows[(gather->first + i) % DEPTH]; }

static uint64_t end_of(const llmaas_gathered * piece) { return piece->offset + piece->n_bytes; }

/* Pieces from `first` on that one read has; whole pages of the file. */
static window next_window(const llmaas_gather * gather, int fd, const llmaas_gathered * pieces, size_t first, size_t n) {
    const uint64_t begin = pieces[first].offset / PAGE * PAGE;
    size_t         end   = first + 1;
    while (end < n && pieces[end].offset - end_of(&pieces[end - 1]) <= gather->gap &&
           end_of(&pieces[end]) - begin <= READ_BYTES) {
        end++;
    }
    const uint64_t n_needed = end_of(&pieces[end - 1]) - begin;
    const size_t   n_room   = (size_t) (n_needed + PAGE - 1) / PAGE * PAGE;
    return (window) {
        .read = {.fd = fd, .offset = begin, .n_bytes = (uint32_t) n_room, .n_needed = (uint32_t) n_needed},
        .first = first, .end = end, .n_room = n_room};
}

/* Find its place behind the last window. False: the first ones are in the way. */
static bool place(llmaas_gather * gather, window * w) {
    if (gather->n == DEPTH) {
        return false;
    }
    if (gather->n == 0) {
        w->at = 0;
        return true;
    }
    const window * last = window_at(gather, gather->n - 1);
    return llmaas_ring_place(
        gather->n_ring, window_at(gather, 0)->at, last->at, last->at + last->n_room, w->n_room, &w->at);
}

static void start(llmaas_gather * gather, const window * made, uint64_t * n_read) {
    window * w = window_at(gather, gather->n++);
    *w             = *made;
    w->read.buffer = gather->ring + w->at;
    llmaas_io_start(gather->io, &w->read);
    *n_read += w->read.n_bytes;
}

/* Wait for the first window. False: its read failed. */
static bool finish(llmaas_gather * gather, const llmaas_gathered * pieces) {
    window * w = window_at(gather, 0);
    llmaas_io_wait(gather->io, &w->read);
    for (size_t i = w->first; i < w->end && w->read.error == 0; i++) {
        memcpy(pieces[i].to, (char *) w->read.buffer + (pieces[i].offset - w->read.offset), pieces[i].n_bytes);
    }
    gather->first = (gather->first + 1) % DEPTH;
    gather->n--;
    return w->read.error == 0;
}

/* The ring holds a window of the longest piece at least. */
static bool make_ring(llmaas_gather * gather, const llmaas_gathered * pieces, size_t n) {
    size_t n_ring = RING_BYTES;
    for (size_t i = 0; i < n; i++) {
        const size_t n_room = (pieces[i].n_bytes + 3 * (size_t) PAGE) / PAGE * PAGE;
        n_ring              = n_room > n_ring ? n_room : n_ring;
    }
    if (n_ring <= gather->n_ring) {
        return true;
    }
    char * ring = llmaas_io_memory(n_ring);
    if (!ring) {
        return false;
    }
    llmaas_io_register(gather->io, ring, n_ring);
    llmaas_io_memory_free(gather->ring, gather->n_ring);
    gather->ring   = ring;
    gather->n_ring = n_ring;
    return true;
}

bool llmaas_gather_read(llmaas_gather * gather, int fd, const llmaas_gathered * pieces, size_t n, uint64_t * n_read) {
    bool ok = make_ring(gather, pieces, n);
    for (size_t next = 0; ok && (next < n || gather->n > 0);) {
        window w = next < n ? next_window(gather, fd, pieces, next, n) : (window) {0};
        if (next < n && place(gather, &w)) {
            start(gather, &w, n_read);
            next = w.end;
        } else {
            ok = finish(gather, pieces);
        }
    }
    llmaas_io_drain(gather->io);
    gather->first = gather->n = 0;
    return ok;
}
