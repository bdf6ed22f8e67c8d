#include "llmaas/store.h"

#include "llmaas/chunk.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <string.h>
#include <sys/uio.h>

enum {
    MAX_PER_RUN = 256,
    MAX_IOV     = 2 * MAX_PER_RUN, /* a gap before each */
};
_Static_assert(MAX_IOV <= IOV_MAX, "a run fits one system call");

typedef ssize_t (*vector_call)(int, const struct iovec *, int, off_t);

typedef struct extents {
    const uint64_t * offsets;
    const uint64_t * lengths;
    const uint8_t * const * data;
} extents;

/* Extents that travel together, and where their bytes go or come from. */
typedef struct run {
    uint32_t n;
    int      n_iov;
    struct iovec iov[MAX_IOV];
} run;

/* What lies between payloads is read to here and never looked at. */
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

/* Up to MAX_PER_RUN of the next extents, by their places in the file. Most come in order. */
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

/* The leading extents that travel together. Whole blocks, so that the file may be open with O_DIRECT. */
static void run_begin(run * r, const extents * e, const uint32_t * order, uint32_t n, uint64_t most_gap) {
    uint64_t end = e->offsets[order[0]], total = 0;
    r->n_iov = 0;
    for (r->n = 0; r->n < n; ++r->n) {
        const uint32_t i      = order[r->n];
        const uint64_t length = round_up(e->lengths[i]), gap = e->offsets[i] - end; /* huge where extents overlap */
        if (r->n > 0 && (gap > most_gap || total + e->lengths[i] > LLMAAS_RECORD_MAX)) {
            break;
        }
        if (gap > 0) {
            r->iov[r->n_iov++] = (struct iovec) {gap_bytes, (size_t) gap};
        }
        /* struct iovec has no const; pwritev does not write through it */
        r->iov[r->n_iov++] = (struct iovec) {(void *) (uintptr_t) e->data[i], (size_t) length};
        total += e->lengths[i];
        end = e->offsets[i] + length;
    }
}

/* Move everything, through short transfers and interruptions. Returns bytes moved; less than asked at end of file
 * (stats->sys_errno untouched) or after an error. */
static uint64_t transfer(vector_call call, int fd, struct iovec * iov, int n_iov, uint64_t offset, llmaas_io_stats * stats) {
    uint64_t moved = 0;
    while (n_iov > 0) {
        const ssize_t n = call(fd, iov, n_iov, (off_t) (offset + moved));
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
        size_t left = (size_t) n;
        while (n_iov > 0 && left >= iov->iov_len) {
            left -= iov->iov_len;
            ++iov;
            --n_iov;
        }
        if (left > 0) {
            iov->iov_base = (uint8_t *) iov->iov_base + left;
            iov->iov_len -= left;
        }
    }
    return moved;
}

static void verify_run(const extents * e, const uint32_t * order, uint32_t n, const uint8_t (* keys)[32], uint64_t moved,
                       int32_t * statuses) {
    for (uint32_t at = 0; at < n; ++at) {
        const uint32_t i        = order[at];
        const bool     complete = moved >= e->offsets[i] - e->offsets[order[0]] + e->lengths[i];
        statuses[i] =
            complete ? (int32_t) llmaas_chunk_verify(e->data[i], (size_t) e->lengths[i], keys[i]) : LLMAAS_EIO;
    }
}

llmaas_status llmaas_store_read(
    int fd, uint32_t n, const uint64_t * offsets, const uint64_t * lengths, uint8_t * const * dst,
    const uint8_t (* keys)[32], int32_t * statuses, llmaas_io_stats * stats) {
    if (fd < 0 || !stats || (n > 0 && (!offsets || !lengths || !dst || !keys || !statuses))) {
        return LLMAAS_EINVAL;
    }
    *stats = (llmaas_io_stats) {0};
    const extents e = {offsets, lengths, (const uint8_t * const *) dst};
    if (!extents_ok(&e, n)) {
        return LLMAAS_EINVAL;
    }
    for (uint32_t i = 0, n_here; i < n; i += n_here) {
        uint32_t order[MAX_PER_RUN];
        run      r;
        n_here = order_by_place(&e, i, n, order);
        for (uint32_t at = 0; at < n_here; at += r.n) {
            run_begin(&r, &e, order + at, n_here - at, LLMAAS_STORE_GAP);
            const uint64_t moved = transfer(preadv, fd, r.iov, r.n_iov, offsets[order[at]], stats);
            verify_run(&e, order + at, r.n, keys, moved, statuses);
        }
    }
    return LLMAAS_OK;
}

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
        uint32_t order[MAX_PER_RUN];
        run      r;
        n_here = order_by_place(&e, i, n, order);
        for (uint32_t at = 0; at < n_here; at += r.n) {
            run_begin(&r, &e, order + at, n_here - at, 0);
            const uint32_t last   = order[at + r.n - 1];
            const uint64_t wanted = offsets[last] + round_up(lengths[last]) - offsets[order[at]];
            if (transfer(pwritev, fd, r.iov, r.n_iov, offsets[order[at]], stats) != wanted) {
                return LLMAAS_EIO;
            }
        }
    }
    return LLMAAS_OK;
}

static bool write_zeros(int fd, uint64_t offset, uint64_t length, llmaas_io_stats * stats) {
    static const uint8_t zeros[16 * LLMAAS_STORE_BLOCK];
    for (uint64_t done = 0; done < length;) {
        const uint64_t step = length - done < sizeof zeros ? length - done : sizeof zeros;
        struct iovec iov = {(void *) (uintptr_t) zeros, (size_t) step};
        if (transfer(pwritev, fd, &iov, 1, offset + done, stats) != step) {
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
