#include "llmaas/store.h"

#include "iov.h"
#include "llmaas/chunk.h"
#include "llmaas/io.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    MAX_PER_RUN = 256,
    MAX_IOV     = 2 * MAX_PER_RUN, /* a gap before each */
    DEPTH       = 8,               /* runs read at a time; more were not faster */
};
_Static_assert(MAX_IOV <= IOV_MAX, "a run fits one system call");

typedef ssize_t (*vector_call)(int, const struct iovec *, int, off_t);

typedef struct extents {
    const uint64_t * offsets;
    const uint64_t * lengths;
    const uint8_t * const * data;
} extents;

/* Extents transferred in one system call, and where their bytes go or come from. */
typedef struct run {
    const uint32_t * order; /* indices of the extents */
    uint32_t         n, n_iov;
    struct iovec *   iov;
    uint64_t         offset, n_bytes; /* in the file, gaps included */
} run;

/* Bytes between payloads are read into this, and never used. */
static _Thread_local _Alignas(LLMAAS_STORE_BLOCK) uint8_t gap_bytes[LLMAAS_STORE_GAP];

static uint64_t round_up(uint64_t n) { return (n + LLMAAS_STORE_BLOCK - 1) & ~(uint64_t) (LLMAAS_STORE_BLOCK - 1); }

static bool places_ok(uint32_t n, const uint64_t * offsets, const uint64_t * lengths) {
    for (uint32_t i = 0; i < n; ++i) {
        if (offsets[i] % LLMAAS_STORE_BLOCK != 0 || lengths[i] == 0 || lengths[i] > INT64_MAX / 2 ||
            offsets[i] > INT64_MAX / 2) {
            return false;
        }
    }
    return true;
}

static bool extents_ok(const extents * e, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
        if ((uintptr_t) e->data[i] % LLMAAS_STORE_BLOCK != 0) {
            return false;
        }
    }
    return places_ok(n, e->offsets, e->lengths);
}

/* Sort up to MAX_PER_RUN of the next extents by offset (insertion sort: most come in order). Return how many. */
static uint32_t order_by_place(const extents * e, uint32_t first, uint32_t n, uint32_t * order) {
    const uint32_t n_here = n - first < MAX_PER_RUN ? n - first : MAX_PER_RUN;
    for (uint32_t i = 0; i < n_here; ++i) {
        uint32_t at = i;
        for (; at > 0 && e->offsets[order[at - 1]] > e->offsets[first + i]; --at) {
            order[at] = order[at - 1];
        }
        order[at] = first + i;
    }
    return n_here;
}

/* Return the run of the first extents, of n. It has whole blocks, so the file may be open with O_DIRECT. */
static run run_of(const extents * e, const uint32_t * order, uint32_t n, uint64_t most_gap, struct iovec * iov) {
    run      r   = {.order = order, .iov = iov, .offset = e->offsets[order[0]]};
    uint64_t end = r.offset, total = 0;
    for (; r.n < n; ++r.n) {
        const uint32_t i      = order[r.n];
        const uint64_t length = round_up(e->lengths[i]), gap = e->offsets[i] - end; /* huge if extents overlap */
        if (r.n > 0 && (gap > most_gap || total + e->lengths[i] > LLMAAS_RECORD_MAX)) {
            break;
        }
        if (gap > 0) {
            iov[r.n_iov++] = (struct iovec) {gap_bytes, (size_t) gap};
        }
        /* struct iovec has no const; pwritev does not write through it */
        iov[r.n_iov++] = (struct iovec) {(void *) (uintptr_t) e->data[i], (size_t) length};
        total += e->lengths[i];
        end = e->offsets[i] + length;
    }
    r.n_bytes = end - r.offset;
    return r;
}

/* Transfer all bytes, through short transfers and interruptions. Return the bytes moved: fewer at end of file
 * (stats->sys_errno unchanged) or after an error. */
static uint64_t transfer(vector_call call, int fd, const run * r, llmaas_io_stats * stats) {
    struct iovec * iov   = r->iov;
    uint64_t       moved = 0;
    for (uint32_t n_iov = r->n_iov; n_iov > 0;) {
        const ssize_t n = call(fd, iov, (int) n_iov, (off_t) (r->offset + moved));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && stats->sys_errno == 0) {
            stats->sys_errno = errno;
        }
        if (n <= 0) {
            break;
        }
        stats->n_calls++;
        stats->bytes += (uint64_t) n;
        moved += (uint64_t) n;
        n_iov = llmaas_iov_skip(&iov, n_iov, (size_t) n);
    }
    return moved;
}

/* -- reading ------------------------------------------------------------------------------------------------------- */

/* Each thread has an engine, closed when the thread ends. A forked child opens another one: it must not use its
 * parent's. */
static _Thread_local pid_t       process;
static _Thread_local llmaas_io * thread_io;
static pthread_key_t             at_thread_end;

static void close_engine(void * io) {
    if (process == getpid()) {
        llmaas_io_close(io);
    }
}

static void make_key(void) { pthread_key_create(&at_thread_end, close_engine); }

/* Return this thread's engine; NULL if it cannot be opened. */
static llmaas_io * engine(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (process != getpid()) {
        pthread_once(&once, make_key);
        process   = getpid();
        thread_io = NULL;
        llmaas_io_open(LLMAAS_IO_BEST, DEPTH, &thread_io);
        pthread_setspecific(at_thread_end, thread_io);
    }
    return thread_io;
}

/* A batch of reads, and the places for its results. */
typedef struct reading {
    int              fd;
    extents          extents;
    const uint8_t (* keys)[32];
    int32_t *         statuses;
    llmaas_io_stats * stats;
} reading;

static void verify(const reading * g, const run * r, uint64_t moved) {
    for (uint32_t at = 0; at < r->n; ++at) {
        const uint32_t i           = r->order[at];
        const uint64_t length      = g->extents.lengths[i];
        const bool     is_complete = moved >= g->extents.offsets[i] - r->offset + length;
        g->statuses[i] =
            is_complete ? (int32_t) llmaas_chunk_verify(g->extents.data[i], (size_t) length, g->keys[i]) : LLMAAS_EIO;
    }
}

static void read_in_turn(const reading * g, const run * runs, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
        verify(g, &runs[i], transfer(preadv, g->fd, &runs[i], g->stats));
    }
}

/* Start a read and submit it at once: the kernel starts reads submitted together only when it has prepared all of
 * them. */
static void start(llmaas_io * io, const reading * g, const run * r, llmaas_io_read * read) {
    const uint32_t last = r->order[r->n - 1];
    *read = (llmaas_io_read) {
        .fd       = g->fd,
        .offset   = r->offset,
        .n_bytes  = (uint32_t) r->n_bytes,
        .n_needed = (uint32_t) (g->extents.offsets[last] - r->offset + g->extents.lengths[last]),
        .vector   = r->iov,
        .n_pieces = r->n_iov};
    llmaas_io_start(io, read);
    llmaas_io_poll(io);
}

static uint64_t finish(llmaas_io * io, const llmaas_io_read * read, llmaas_io_stats * stats) {
    llmaas_io_wait(io, read);
    if (stats->sys_errno == 0 && read->error != ENODATA) {
        stats->sys_errno = read->error;
    }
    stats->n_calls += read->n_read > 0;
    stats->bytes += read->n_read;
    return read->n_read;
}

/* Read runs together; verify some while others are read. */
static void read_together(llmaas_io * io, const reading * g, const run * runs, uint32_t n) {
    llmaas_io_read reads[DEPTH];
    for (uint32_t i = 0; i < n && i < DEPTH; ++i) {
        start(io, g, &runs[i], &reads[i]);
    }
    for (uint32_t i = 0; i < n; ++i) {
        llmaas_io_read * read  = &reads[i % DEPTH];
        const uint64_t   moved = finish(io, read, g->stats);
        if (i + DEPTH < n) {
            start(io, g, &runs[i + DEPTH], read);
        }
        verify(g, &runs[i], moved);
    }
}

/* Read up to MAX_PER_RUN extents from `first` on. Return how many. */
static uint32_t read_some(const reading * g, uint32_t first, uint32_t n, bool is_ahead) {
    uint32_t       order[MAX_PER_RUN], n_runs = 0, n_iov = 0;
    run            runs[MAX_PER_RUN];
    struct iovec   iov[MAX_IOV];
    bool           is_large = false;
    const uint32_t n_here   = order_by_place(&g->extents, first, n, order);
    for (uint32_t at = 0; at < n_here; at += runs[n_runs++].n) {
        runs[n_runs] = run_of(&g->extents, order + at, n_here - at, LLMAAS_STORE_GAP, iov + n_iov);
        n_iov += runs[n_runs].n_iov;
        is_large = is_large || runs[n_runs].n_bytes > UINT32_MAX;
    }
    llmaas_io * io = n_runs > 1 && !is_large && !is_ahead ? engine() : NULL;
    if (io) {
        read_together(io, g, runs, n_runs);
    } else {
        read_in_turn(g, runs, n_runs);
    }
    return n_here;
}

llmaas_status llmaas_store_read(
    int fd, uint32_t n, const uint64_t * offsets, const uint64_t * lengths, uint8_t * const * dst,
    const uint8_t (* keys)[32], bool is_ahead, int32_t * statuses, llmaas_io_stats * stats) {
    if (fd < 0 || !stats || (n > 0 && (!offsets || !lengths || !dst || !keys || !statuses))) {
        return LLMAAS_EINVAL;
    }
    *stats = (llmaas_io_stats) {0};
    const reading g = {fd, {offsets, lengths, (const uint8_t * const *) dst}, keys, statuses, stats};
    if (!extents_ok(&g.extents, n)) {
        return LLMAAS_EINVAL;
    }
    if (!is_ahead) {
        llmaas_io_begin_waiting();
    }
    for (uint32_t i = 0; i < n;) {
        i += read_some(&g, i, n, is_ahead);
    }
    if (!is_ahead) {
        llmaas_io_end_waiting();
    }
    return LLMAAS_OK;
}

/* -- writing and erasing ------------------------------------------------------------------------------------------- */

llmaas_status llmaas_store_write(
    int fd, uint32_t n, const uint64_t * offsets, const uint64_t * lengths, const uint8_t * const * src,
    llmaas_io_stats * stats) {
    if (fd < 0 || !stats || (n > 0 && (!offsets || !lengths || !src))) {
        return LLMAAS_EINVAL;
    }
    *stats = (llmaas_io_stats) {0};
    const extents e = {offsets, lengths, src};
    if (!extents_ok(&e, n)) {
        return LLMAAS_EINVAL;
    }
    for (uint32_t i = 0, n_here; i < n; i += n_here) {
        uint32_t     order[MAX_PER_RUN], n_moved = 0;
        struct iovec iov[MAX_IOV];
        n_here = order_by_place(&e, i, n, order);
        while (n_moved < n_here) {
            const run r = run_of(&e, order + n_moved, n_here - n_moved, 0, iov);
            if (transfer(pwritev, fd, &r, stats) != r.n_bytes) {
                return LLMAAS_EIO;
            }
            n_moved += r.n;
        }
    }
    return LLMAAS_OK;
}

static bool write_zeros(int fd, uint64_t offset, uint64_t length, llmaas_io_stats * stats) {
    static const uint8_t zeros[16 * LLMAAS_STORE_BLOCK];
    for (uint64_t done = 0; done < length;) {
        const uint64_t step = length - done < sizeof zeros ? length - done : sizeof zeros;
        struct iovec   iov  = {(void *) (uintptr_t) zeros, (size_t) step};
        const run      r    = {.n_iov = 1, .iov = &iov, .offset = offset + done};
        if (transfer(pwritev, fd, &r, stats) != step) {
            return false;
        }
        done += step;
    }
    return true;
}

static bool punch(int fd, uint64_t offset, uint64_t length) {
#ifdef FALLOC_FL_PUNCH_HOLE
    int rc;
    do {
        rc = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t) offset, (off_t) length);
    } while (rc != 0 && errno == EINTR);
    return rc == 0;
#else
    (void) fd, (void) offset, (void) length;
    return false;
#endif
}

llmaas_status llmaas_store_erase(
    int fd, uint32_t n, const uint64_t * offsets, const uint64_t * lengths, llmaas_io_stats * stats) {
    if (fd < 0 || !stats || (n > 0 && (!offsets || !lengths))) {
        return LLMAAS_EINVAL;
    }
    *stats = (llmaas_io_stats) {0};
    if (!places_ok(n, offsets, lengths)) {
        return LLMAAS_EINVAL;
    }
    for (uint32_t i = 0; i < n; ++i) {
        const uint64_t length = round_up(lengths[i]);
        if (punch(fd, offsets[i], length)) {
            stats->n_calls++;
            stats->bytes += length;
        } else if (!write_zeros(fd, offsets[i], length, stats)) {
            return LLMAAS_EIO;
        }
    }
    return LLMAAS_OK;
}
