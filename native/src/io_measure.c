#include "clock.h"
#include "llmaas/io.h"

#include <errno.h>
#include <stdlib.h>

typedef struct measured {
    llmaas_io *      io;
    char *           memory; /* of all reads */
    size_t           n_memory;
    llmaas_io_read * reads;
    uint32_t         depth;
} measured;

static void close_all(measured * m) {
    llmaas_io_close(m->io);
    free(m->reads);
    llmaas_io_memory_free(m->memory, m->n_memory);
}

static llmaas_status open_all(measured * m, llmaas_io_kind kind, uint32_t n_bytes) {
    llmaas_status status = llmaas_io_open(kind, m->depth, &m->io);
    if (status != LLMAAS_OK) {
        return status;
    }
    m->n_memory = (size_t) m->depth * n_bytes;
    m->memory   = llmaas_io_memory(m->n_memory);
    m->reads    = calloc(m->depth, sizeof *m->reads);
    if (!m->memory || !m->reads) {
        return LLMAAS_ESPACE;
    }
    return llmaas_io_register(m->io, m->memory, m->n_memory);
}

llmaas_status llmaas_io_measure(
    llmaas_io_kind kind, int fd, uint64_t n_file, uint32_t n_bytes, uint32_t depth, double seconds, double * rate) {
    if (n_bytes == 0 || n_bytes % 4096 != 0 || n_file < n_bytes || depth == 0 || depth > LLMAAS_IO_MAX_DEPTH || !rate) {
        return LLMAAS_EINVAL;
    }
    measured      m      = {.depth = depth};
    llmaas_status status = open_all(&m, kind, n_bytes);
    const uint64_t started = llmaas_now_ns();
    uint64_t      n_done  = 0;
    double        took    = 0;
    for (uint64_t i = 0; status == LLMAAS_OK && took < seconds; i++) {
        llmaas_io_read * read = &m.reads[i % depth];
        if (i >= depth) {
            llmaas_io_wait(m.io, read);
            took   = 1e-9 * (double) (llmaas_now_ns() - started);
            n_done += n_bytes;
            errno  = read->error;
            status = read->error ? LLMAAS_EIO : LLMAAS_OK;
        }
        *read = (llmaas_io_read) {
            .fd = fd, .offset = i % (n_file / n_bytes) * n_bytes, .n_bytes = n_bytes, .n_needed = n_bytes,
            .buffer = m.memory + i % depth * n_bytes};
        llmaas_io_start(m.io, read);
        llmaas_io_poll(m.io);
    }
    *rate = took > 0 ? (double) n_done / took : 0;
    const int error = errno;
    close_all(&m);
    errno = error;
    return status;
}
