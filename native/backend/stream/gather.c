#include "stream/gather.h"

#include <string.h>

enum { RING_BYTES = 4 << 20 };

static size_t ring_for(const llmaas_windows * windows, uint32_t n_longest) {
    const size_t n_least = llmaas_windows_least_ring(windows, n_longest);
    return n_least > RING_BYTES ? n_least : RING_BYTES;
}

size_t llmaas_gather_memory(const llmaas_windows * windows) {
    const size_t n_ring = llmaas_windows_ring(windows);
    return n_ring ? n_ring : ring_for(windows, 0);
}

static bool make_ring(llmaas_windows * windows, const llmaas_gathered * pieces, size_t n) {
    uint32_t n_longest = 0;
    for (size_t i = 0; i < n; i++) {
        n_longest = pieces[i].n_bytes > n_longest ? pieces[i].n_bytes : n_longest;
    }
    const size_t n_ring = ring_for(windows, n_longest);
    return n_ring <= llmaas_windows_ring(windows) || llmaas_windows_set_ring(windows, n_ring);
}

/* Wait for the oldest window, whose first piece is pieces[0], and copy its pieces out. False if its read failed. */
static bool finish(llmaas_windows * windows, const llmaas_gathered * pieces) {
    const llmaas_window * w  = llmaas_windows_at(windows, 0);
    const bool            ok = llmaas_windows_await(windows, w);
    for (size_t i = 0; i < w->n_pieces && ok; i++) {
        memcpy(pieces[i].to, llmaas_window_find(w, pieces[i].offset, pieces[i].n_bytes), pieces[i].n_bytes);
    }
    llmaas_windows_release(windows);
    return ok;
}

bool llmaas_gather(llmaas_windows * windows, int fd, const llmaas_gathered * pieces, size_t n, uint64_t * n_read) {
    bool   ok     = make_ring(windows, pieces, n);
    size_t n_done = 0;
    for (size_t next = 0; ok && n_done < n;) {
        const size_t n_more = next < n ? llmaas_windows_start(windows, fd, pieces + next, n - next, n_read) : 0;
        next += n_more;
        if (n_more == 0) {
            const size_t n_first = llmaas_windows_at(windows, 0)->n_pieces;
            ok = finish(windows, pieces + n_done);
            n_done += n_first;
        }
    }
    llmaas_windows_clear(windows);
    return ok;
}
