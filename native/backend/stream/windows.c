#include "stream/windows.h"

#include "src/ring.h"

#include <stdlib.h>
#include <string.h>

#define PAGE 4096u

struct llmaas_windows {
    llmaas_io *    io;
    llmaas_reading reading;
    bool           is_ahead;
    char *         ring;
    size_t         n_ring;
    size_t         n_most, first, n;
    llmaas_window  windows[]; /* [n_most], also a ring */
};

llmaas_windows * llmaas_windows_new(const llmaas_reading * reading, size_t n_most, bool is_ahead) {
    llmaas_windows * windows = calloc(1, sizeof *windows + n_most * sizeof *windows->windows);
    if (windows && llmaas_io_open(LLMAAS_IO_BEST, reading->depth, &windows->io) != LLMAAS_OK) {
        free(windows);
        return NULL;
    }
    if (windows) {
        windows->reading  = *reading;
        windows->is_ahead = is_ahead;
        windows->n_most   = n_most;
    }
    return windows;
}

void llmaas_windows_free(llmaas_windows * windows) {
    if (windows) {
        llmaas_io_close(windows->io);
        llmaas_io_memory_free(windows->ring, windows->n_ring);
        free(windows);
    }
}

bool llmaas_windows_set_ring(llmaas_windows * windows, size_t n_bytes) {
    char * ring = llmaas_io_memory(n_bytes);
    if (!ring) {
        return false;
    }
    memset(ring, 0, n_bytes); /* touch it, so that memory accounting sees it now */
    llmaas_io_register(windows->io, ring, n_bytes);
    llmaas_io_memory_free(windows->ring, windows->n_ring);
    windows->ring   = ring;
    windows->n_ring = n_bytes;
    return true;
}

size_t llmaas_windows_ring(const llmaas_windows * windows) { return windows->n_ring; }

size_t llmaas_windows_least_ring(const llmaas_windows * windows, uint32_t n_bytes) {
    const size_t n_room = (n_bytes + 3 * (size_t) PAGE) / PAGE * PAGE;
    return n_room > windows->reading.n_bytes ? n_room : windows->reading.n_bytes;
}

size_t llmaas_windows_count(const llmaas_windows * windows) { return windows->n; }

llmaas_window * llmaas_windows_at(llmaas_windows * windows, size_t i) {
    return &windows->windows[(windows->first + i) % windows->n_most];
}

static uint64_t end_of(const llmaas_gathered * piece) { return piece->offset + piece->n_bytes; }

/* Make a window of as many pieces as one read can cover. */
static llmaas_window next_window(const llmaas_windows * windows, int fd, const llmaas_gathered * pieces, size_t n) {
    const uint64_t begin = pieces[0].offset / PAGE * PAGE;
    size_t         end   = 1;
    while (end < n && pieces[end].offset - end_of(&pieces[end - 1]) <= (uint32_t) windows->reading.n_gap &&
           end_of(&pieces[end]) - begin <= windows->reading.n_bytes) {
        end++;
    }
    const uint64_t n_needed = end_of(&pieces[end - 1]) - begin;
    return (llmaas_window) {
        .read = {.fd = fd, .offset = begin, .n_bytes = (uint32_t) ((n_needed + PAGE - 1) / PAGE * PAGE),
                 .n_needed = (uint32_t) n_needed, .is_ahead = windows->is_ahead},
        .n_pieces = end};
}

/* Find room for a window behind the last one. False if the first ones are in the way. */
static bool place(llmaas_windows * windows, llmaas_window * w) {
    if (windows->n == 0) {
        w->at = 0;
        return w->read.n_bytes <= windows->n_ring;
    }
    const llmaas_window * first = llmaas_windows_at(windows, 0), * last = llmaas_windows_at(windows, windows->n - 1);
    return llmaas_ring_place(windows->n_ring, first->at, last->at, last->at + last->read.n_bytes, w->read.n_bytes, &w->at);
}

size_t llmaas_windows_start(llmaas_windows * windows, int fd, const llmaas_gathered * pieces, size_t n, uint64_t * n_read) {
    const uint32_t n_room = windows->is_ahead ? llmaas_io_room_ahead(windows->io) : llmaas_io_room(windows->io);
    if (windows->n == windows->n_most || n_room == 0) {
        return 0;
    }
    llmaas_window made = next_window(windows, fd, pieces, n);
    if (!place(windows, &made)) {
        return 0;
    }
    llmaas_window * w = llmaas_windows_at(windows, windows->n++);
    *w             = made;
    w->read.buffer = windows->ring + w->at;
    llmaas_io_start(windows->io, &w->read);
    *n_read += w->read.n_bytes;
    return w->n_pieces;
}

void llmaas_windows_poll(llmaas_windows * windows) { llmaas_io_poll(windows->io); }

const char * llmaas_window_find(const llmaas_window * window, uint64_t offset, uint32_t n_bytes) {
    const llmaas_io_read * read = &window->read;
    const bool has = offset >= read->offset && offset + n_bytes <= read->offset + read->n_needed;
    return has ? (const char *) read->buffer + (offset - read->offset) : NULL;
}

bool llmaas_windows_await(llmaas_windows * windows, const llmaas_window * window) {
    llmaas_io_wait(windows->io, &window->read);
    return window->read.error == 0;
}

void llmaas_windows_release(llmaas_windows * windows) {
    windows->first = (windows->first + 1) % windows->n_most;
    windows->n--;
}

void llmaas_windows_clear(llmaas_windows * windows) {
    llmaas_io_drain(windows->io);
    windows->first = windows->n = 0;
}
