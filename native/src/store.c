#include "llmaas/store.h"

#include "llmaas/chunk.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/uio.h>

enum {
    MAX_PER_RUN = LLMAAS_RECORD_MAX / LLMAAS_STORE_BLOCK, /* an extent takes at least one block */
};

typedef ssize_t (*vector_call)(int, const struct iovec *, int, off_t);

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

static bool extents_ok(uint32_t n, const uint64_t * offsets, const uint64_t * lengths, const uint8_t * const * data) {
    for (uint32_t i = 0; i < n; ++i) {
        if ((uintptr_t) data[i] % LLMAAS_STORE_BLOCK != 0) {
            return false;
        }
    }
    return places_ok(n, offsets, lengths);
}

/* One past the last extent that travels with extent i. */
static uint32_t run_end(uint32_t i, uint32_t n, const uint64_t * offsets, const uint64_t * lengths) {
    uint64_t end = offsets[i] + round_up(lengths[i]);
    uint32_t j   = i + 1;
    while (j < n && offsets[j] == end && end + round_up(lengths[j]) - offsets[i] <= LLMAAS_RECORD_MAX) {
        end += round_up(lengths[j++]);
    }
    return j;
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

/* Whole blocks, so that the file may be open with O_DIRECT. */
static void run_iov(struct iovec * iov, uint32_t n, const uint64_t * lengths, const uint8_t * const * data) {
    for (uint32_t i = 0; i < n; ++i) {
        /* struct iovec has no const; pwritev does not write through it */
        iov[i] = (struct iovec) {(void *) (uintptr_t) data[i], (size_t) round_up(lengths[i])};
    }
}

static void verify_run(uint32_t n, const uint64_t * lengths, uint8_t * const * dst, const uint8_t (* keys)[32],
                       uint64_t moved, int32_t * statuses) {
    uint64_t at = 0;
    for (uint32_t i = 0; i < n; ++i) {
        const bool complete = moved >= at + lengths[i];
        statuses[i] = complete ? (int32_t) llmaas_chunk_verify(dst[i], (size_t) lengths[i], keys[i]) : LLMAAS_EIO;
        at += round_up(lengths[i]);
    }
}

llmaas_status llmaas_store_read(
    int fd, uint32_t n, const uint64_t * offsets, const uint64_t * lengths, uint8_t * const * dst,
    const uint8_t (* keys)[32], int32_t * statuses, llmaas_io_stats * stats) {
    if (fd < 0 || !stats || (n > 0 && (!offsets || !lengths || !dst || !keys || !statuses))) {
        return LLMAAS_EINVAL;
    }
    *stats = (llmaas_io_stats) {0};
    const uint8_t * const * data = (const uint8_t * const *) dst;
    if (!extents_ok(n, offsets, lengths, data)) {
        return LLMAAS_EINVAL;
    }
    for (uint32_t i = 0, end; i < n; i = end) {
        struct iovec iov[MAX_PER_RUN];
        end = run_end(i, n, offsets, lengths);
        run_iov(iov, end - i, lengths + i, data + i);
        const uint64_t moved = transfer(preadv, fd, iov, (int) (end - i), offsets[i], stats);
        verify_run(end - i, lengths + i, dst + i, keys + i, moved, statuses + i);
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
    if (!extents_ok(n, offsets, lengths, src)) {
        return LLMAAS_EINVAL;
    }
    for (uint32_t i = 0, end; i < n; i = end) {
        struct iovec iov[MAX_PER_RUN];
        end = run_end(i, n, offsets, lengths);
        run_iov(iov, end - i, lengths + i, src + i);
        const uint64_t wanted = offsets[end - 1] + round_up(lengths[end - 1]) - offsets[i];
        if (transfer(pwritev, fd, iov, (int) (end - i), offsets[i], stats) != wanted) {
            return LLMAAS_EIO;
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
