#include "stream/lookup.h"

#include "llmaas/io.h"
#include "src/clock.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define PAGE 4096u

enum { DEPTH = 32 };

struct llmaas_lookup {
    llmaas_io *    io;
    int            fd;
    uint64_t       offset;
    char *         pages; /* [DEPTH][n_window]: pages being read */
    size_t         n_window;
    llmaas_io_read reads[DEPTH];
    char *         rows;    /* [n_room][bytes of a row]: the rows of a graph, in its order */
    int32_t *      numbers; /* [n_room]: 0, 1, 2 … */
    size_t         n_room;
    atomic_ullong  n_read, stalled_ns; /* other threads ask for them meanwhile */
};

llmaas_lookup * llmaas_lookup_new(int fd, uint64_t offset) {
    llmaas_lookup * lookup = calloc(1, sizeof *lookup);
    if (lookup && llmaas_io_open(LLMAAS_IO_BEST, DEPTH, &lookup->io) != LLMAAS_OK) {
        free(lookup);
        return NULL;
    }
    if (lookup) {
        lookup->fd     = fd;
        lookup->offset = offset;
    }
    return lookup;
}

void llmaas_lookup_free(llmaas_lookup * lookup) {
    if (lookup) {
        llmaas_io_close(lookup->io);
        free(lookup->pages);
        free(lookup->rows);
        free(lookup->numbers);
        free(lookup);
    }
}

llmaas_lookup_stats llmaas_lookup_read_stats(const llmaas_lookup * lookup) {
    return (llmaas_lookup_stats) {lookup->n_read, lookup->stalled_ns};
}

/* Make room for a graph's rows. A row can start anywhere, so it is read with the whole pages around it. */
static bool make_room(llmaas_lookup * lookup, size_t n_rows, size_t n_bytes) {
    if (!lookup->pages) {
        lookup->n_window = (n_bytes + 2 * PAGE - 2) / PAGE * PAGE;
        lookup->pages    = aligned_alloc(PAGE, DEPTH * lookup->n_window);
    }
    if (n_rows > lookup->n_room) {
        free(lookup->rows);
        free(lookup->numbers);
        lookup->rows    = malloc(n_rows * n_bytes);
        lookup->numbers = malloc(n_rows * sizeof *lookup->numbers);
        lookup->n_room  = lookup->rows && lookup->numbers ? n_rows : 0;
        for (size_t i = 0; i < lookup->n_room; i++) {
            lookup->numbers[i] = (int32_t) i;
        }
    }
    return lookup->pages && n_rows <= lookup->n_room;
}

/* Argument of the step that reads a node's rows. */
struct wanted {
    llmaas_lookup *            lookup;
    llmaas_graph *             graph;
    const struct ggml_tensor * numbers; /* I32 [n] */
    struct ggml_tensor *       rows;    /* source of the node: [n] rows, and their numbers. Their data are set when */
    struct ggml_tensor *       counted; /* the node is computed, as a later node of the graph may need more room. */
    int64_t                    n_all;
    size_t                     n_bytes; /* bytes of a row */
};

static void start(const struct wanted * w, int64_t i, int64_t row) {
    llmaas_lookup *  lookup = w->lookup;
    const uint64_t   at     = lookup->offset + (uint64_t) row * w->n_bytes, begin = at / PAGE * PAGE;
    const uint32_t   n      = (uint32_t) (at - begin + w->n_bytes);
    llmaas_io_read * read   = &lookup->reads[i % DEPTH];
    *read = (llmaas_io_read) {
        .fd = lookup->fd, .offset = begin, .n_bytes = (n + PAGE - 1) / PAGE * PAGE, .n_needed = n,
        .buffer = lookup->pages + (size_t) (i % DEPTH) * lookup->n_window};
    lookup->n_read += read->n_bytes;
    llmaas_io_start(lookup->io, read);
}

/* Wait for row i and copy it out. False if it cannot be read. */
static bool finish(const struct wanted * w, int64_t i) {
    const llmaas_io_read * read = &w->lookup->reads[i % DEPTH];
    llmaas_io_wait(w->lookup->io, read);
    if (read->error == 0) {
        memcpy(w->lookup->rows + (size_t) i * w->n_bytes, (char *) read->buffer + read->n_needed - w->n_bytes, w->n_bytes);
    }
    return read->error == 0;
}

static void have_rows(void * arg, int ith, int nth) {
    const struct wanted * w  = arg;
    const int64_t         n  = w->numbers->ne[0];
    bool                  ok = true;
    (void) nth;
    if (ith != 0) {
        return;
    }
    const uint64_t started = llmaas_now_ns();
    w->rows->data          = w->lookup->rows;
    w->counted->data       = w->lookup->numbers;
    ok                     = !llmaas_graph_failed(w->graph);
    for (int64_t i = 0; ok && i < n + DEPTH; i++) {
        ok = i < DEPTH || i - DEPTH >= n || finish(w, i - DEPTH);
        if (ok && i < n) {
            const int32_t row = ((const int32_t *) w->numbers->data)[i];
            ok = row >= 0 && row < w->n_all;
            if (ok) {
                start(w, i, row);
            }
        }
    }
    llmaas_io_drain(w->lookup->io);
    w->lookup->stalled_ns += llmaas_now_ns() - started;
    if (!ok) { /* zeros, as from the arena */
        memset(w->lookup->rows, 0, (size_t) n * w->n_bytes);
        llmaas_graph_fail(w->graph);
    }
}

bool llmaas_lookup_rows(llmaas_lookup * lookup, llmaas_graph * graph, struct ggml_tensor * node) {
    const int64_t        n       = node->src[1]->ne[0];
    struct ggml_tensor * looked  = llmaas_graph_copy(graph, node);
    struct ggml_tensor * rows    = llmaas_graph_copy(graph, node->src[0]);
    struct ggml_tensor * numbers = llmaas_graph_copy(graph, node->src[1]);
    const struct wanted  wanted  = {
        lookup, graph, node->src[1], rows, numbers, node->src[0]->ne[1], node->src[0]->nb[1]};
    if (!looked || !rows || !numbers || !make_room(lookup, (size_t) n, wanted.n_bytes) ||
        !llmaas_graph_step(graph, have_rows, &wanted, sizeof wanted)) {
        return false;
    }
    rows->buffer   = NULL;
    rows->ne[1]    = n;
    rows->nb[2]    = rows->nb[3] = (size_t) n * wanted.n_bytes;
    looked->src[0] = rows;
    looked->src[1] = numbers;
    llmaas_graph_append(graph, looked);
    return true;
}
