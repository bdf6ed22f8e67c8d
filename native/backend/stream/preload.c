#include "stream/preload.h"

#include "src/grow.h"
#include "stream/windows.h"

#include <stdlib.h>

#define PAGE 4096u

enum {
    MAX_BATCHES = 16,
    MAX_WINDOWS = 4096,
    DEPTH_SHARE = 4, /* preloading uses 1/4 of the reads in flight that demand uses, which must not wait for all of
                      * them */
    RING_READS  = 4, /* reads that the memory has room for at least */
};

typedef struct batch {
    const void *      key;
    int               fd;
    llmaas_gathered * pieces;
    size_t            n, n_capacity, n_started;
    size_t            n_windows; /* windows that hold the started pieces */
    bool              is_last, is_over; /* in use for the last time; no longer in use */
} batch;

struct llmaas_preload {
    llmaas_reading   reading;
    size_t           n_memory;
    llmaas_windows * windows; /* of all batches, in order; NULL: nothing is read ahead */
    batch            batches[MAX_BATCHES]; /* a ring */
    size_t           first, n;
    batch *          used; /* NULL: none */
    size_t           begin, end, next; /* range of its windows, and the next one to look at */

    llmaas_preload_stats stats;
};

/* -- creation and destruction ------------------------------------------------------------------------------------ */

llmaas_preload * llmaas_preload_new(void) { return calloc(1, sizeof(llmaas_preload)); }

void llmaas_preload_free(llmaas_preload * preload) {
    if (!preload) {
        return;
    }
    llmaas_windows_free(preload->windows);
    for (size_t i = 0; i < MAX_BATCHES; i++) {
        free(preload->batches[i].pieces);
    }
    free(preload);
}

llmaas_preload_stats llmaas_preload_read_stats(const llmaas_preload * preload) { return preload->stats; }

/* Create the windows. NULL if out of memory, or if n_memory is too small. */
static llmaas_windows * windows_new(llmaas_reading reading, size_t n_memory) {
    const size_t n_most = n_memory / RING_READS / PAGE * PAGE;
    if (n_most == 0 || reading.depth == 0) {
        return NULL;
    }
    reading.depth            = (reading.depth + DEPTH_SHARE - 1) / DEPTH_SHARE;
    reading.n_bytes          = reading.n_bytes < n_most ? reading.n_bytes : (uint32_t) n_most;
    llmaas_windows * windows = llmaas_windows_new(&reading, MAX_WINDOWS, true);
    if (windows && !llmaas_windows_set_ring(windows, n_memory)) {
        llmaas_windows_free(windows);
        return NULL;
    }
    return windows;
}

static void renew_windows(llmaas_preload * preload) {
    llmaas_windows_free(preload->windows);
    preload->windows = windows_new(preload->reading, preload->n_memory);
}

void llmaas_preload_set_reading(llmaas_preload * preload, const llmaas_reading * reading) {
    preload->reading = *reading;
    renew_windows(preload);
}

void llmaas_preload_set_memory(llmaas_preload * preload, uint64_t n_bytes) {
    if (n_bytes != preload->n_memory) {
        preload->n_memory = n_bytes;
        renew_windows(preload);
    }
}

size_t llmaas_preload_memory(const llmaas_preload * preload) {
    return preload->windows ? llmaas_windows_ring(preload->windows) : 0;
}

/* -- batches ----------------------------------------------------------------------------------------------------- */

static batch * batch_at(llmaas_preload * preload, size_t i) { return &preload->batches[(preload->first + i) % MAX_BATCHES]; }

bool llmaas_preload_begin(llmaas_preload * preload, const void * key, int fd) {
    for (size_t i = 0; i < preload->n; i++) {
        if (batch_at(preload, i)->key == key) {
            return false;
        }
    }
    if (preload->n == MAX_BATCHES || !preload->windows) {
        return false;
    }
    batch * b = batch_at(preload, preload->n++);
    *b        = (batch) {.key = key, .fd = fd, .pieces = b->pieces, .n_capacity = b->n_capacity};
    return true;
}

bool llmaas_preload_want(llmaas_preload * preload, uint64_t offset, uint32_t n_bytes) {
    batch *           b      = batch_at(preload, preload->n - 1);
    llmaas_gathered * pieces = llmaas_grown(b->pieces, b->n, &b->n_capacity, sizeof *pieces);
    if (pieces) {
        b->pieces         = pieces;
        b->pieces[b->n++] = (llmaas_gathered) {.offset = offset, .n_bytes = n_bytes};
    }
    return pieces != NULL;
}

/* -- reading ----------------------------------------------------------------------------------------------------- */

static void release_first(llmaas_preload * preload) {
    const llmaas_window * w = llmaas_windows_at(preload->windows, 0);
    preload->stats.n_wasted += w->read.n_bytes > w->n_used ? w->read.n_bytes - w->n_used : 0;
    llmaas_windows_release(preload->windows);
}

/* Release the batches that are over, up to the first read in flight. */
static void release_batches(llmaas_preload * preload) {
    for (; preload->n > 0 && batch_at(preload, 0)->is_over; preload->n--) {
        batch * b = batch_at(preload, 0);
        for (; b->n_windows > 0; b->n_windows--) {
            if (!llmaas_windows_at(preload->windows, 0)->read.is_done) {
                return;
            }
            release_first(preload);
        }
        preload->first = (preload->first + 1) % MAX_BATCHES;
    }
}

/* Start a batch's reads. False if there was no room for all. */
static bool start_reads(llmaas_preload * preload, batch * b) {
    while (b->n_started < b->n) {
        const size_t n = llmaas_windows_start(
            preload->windows, b->fd, b->pieces + b->n_started, b->n - b->n_started, &preload->stats.n_read);
        if (n == 0) {
            return false;
        }
        b->n_started += n;
        b->n_windows++;
    }
    return true;
}

void llmaas_preload_submit(llmaas_preload * preload) {
    release_batches(preload);
    if (preload->n == 0) {
        return;
    }
    size_t i = 0;
    while (i < preload->n && start_reads(preload, batch_at(preload, i))) {
        i++;
    }
    llmaas_windows_poll(preload->windows);
}

/* -- using batches ----------------------------------------------------------------------------------------------- */

void llmaas_preload_use(llmaas_preload * preload, const void * key, bool is_last) {
    if (preload->used) {
        preload->used->is_over = preload->used->is_last;
    }
    release_batches(preload);
    preload->used  = NULL;
    preload->begin = 0;
    for (size_t i = 0; i < preload->n && !preload->used; i++) {
        batch * b = batch_at(preload, i);
        if (b->key == key) {
            b->n          = b->n_started;
            b->is_last    = is_last;
            preload->used = b;
            preload->end  = preload->begin + b->n_windows;
        } else {
            preload->begin += b->n_windows;
        }
    }
    preload->next = preload->begin;
}

const char * llmaas_preload_find(llmaas_preload * preload, uint64_t offset, uint32_t n_bytes) {
    for (; preload->used && preload->next < preload->end; preload->next++) {
        llmaas_window * w = llmaas_windows_at(preload->windows, preload->next);
        if (w->read.offset + w->read.n_needed >= offset + n_bytes) {
            const char * found = llmaas_window_find(w, offset, n_bytes);
            w->n_used += found ? n_bytes : 0;
            return found;
        }
    }
    return NULL;
}

bool llmaas_preload_await(llmaas_preload * preload) {
    bool ok = true;
    for (size_t i = preload->begin; preload->used && i < preload->end; i++) {
        const llmaas_window * w = llmaas_windows_at(preload->windows, i);
        ok = ok && (w->n_used == 0 || llmaas_windows_await(preload->windows, w));
    }
    return ok;
}

void llmaas_preload_end(llmaas_preload * preload) {
    if (!preload->windows) {
        return;
    }
    while (llmaas_windows_count(preload->windows) > 0) {
        release_first(preload);
    }
    llmaas_windows_clear(preload->windows);
    preload->used = NULL;
    preload->n    = 0;
}
