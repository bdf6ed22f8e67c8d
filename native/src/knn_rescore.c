#include "llmaas/knn.h"

#include "../kernels/kernels.h"
#include "llmaas/kernels.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { BUFFER = 64 << 10 }; /* rows that are neighbors in the file are read in one call if they fit into this many
                             * bytes */

typedef struct rescoring {
    const llmaas_knn_rows * file;
    size_t row_bytes;
    const float * query;
    float * distances;
    bool is_damaged;
} rescoring;

/* A run of rows that are adjacent in the file. */
typedef struct run {
    uint64_t first;
    uint32_t n;
    const uint64_t * sorted; /* row in the high half, index of its distance in the low half */
} run;

static int by_row(const void * a, const void * b) {
    uint64_t x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return x < y ? -1 : x > y;
}

static run next_run(const uint64_t * sorted, uint32_t n, size_t row_bytes) {
    run r = {.first = sorted[0] >> 32, .n = 1, .sorted = sorted};
    while (r.n < n && sorted[r.n] >> 32 == r.first + r.n && (r.n + 1) * row_bytes <= BUFFER) {
        ++r.n;
    }
    return r;
}

static void measure(rescoring * s, const run * r, const uint8_t * bytes) {
    for (uint32_t i = 0; i < r->n; ++i, bytes += s->row_bytes) {
        s->is_damaged |= llmaas_crc32c(0, bytes, s->row_bytes) != s->file->sums[r->first + i];
        s->distances[(uint32_t) r->sorted[i]] = llmaas_k()->knn_distance(bytes, s->query, s->file->n_dims);
    }
}

static off_t place(const rescoring * s, const run * r) { return (off_t) (s->file->offset + r->first * s->row_bytes); }

/* Measure the run if it is in the page cache. Otherwise have the kernel start reading it. Return whether it was
 * cached. */
static bool try_cached(rescoring * s, const run * r, uint8_t * buffer) {
    const size_t n_bytes = r->n * s->row_bytes;
    const struct iovec vector = {buffer, n_bytes};
    if (preadv2(s->file->fd, &vector, 1, place(s, r), RWF_NOWAIT) == (ssize_t) n_bytes) {
        measure(s, r, buffer);
        return true;
    }
    posix_fadvise(s->file->fd, place(s, r), (off_t) n_bytes, POSIX_FADV_WILLNEED);
    return false;
}

static bool read_run(rescoring * s, const run * r, uint8_t * buffer) {
    const size_t n_bytes = r->n * s->row_bytes;
    for (size_t done = 0; done < n_bytes;) {
        const ssize_t n = pread(s->file->fd, buffer + done, n_bytes - done, place(s, r) + (off_t) done);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            errno = n ? errno : ENODATA;
            return false;
        }
        done += (size_t) n;
    }
    measure(s, r, buffer);
    return true;
}

/* Measure the runs that are in the page cache. Reduce `sorted` to the others; return how many rows these have. */
static uint32_t measure_cached(rescoring * s, uint64_t * sorted, uint32_t n, uint8_t * buffer) {
    uint32_t n_left = 0;
    for (uint32_t i = 0; i < n;) {
        const run r = next_run(sorted + i, n - i, s->row_bytes);
        i += r.n;
        if (!try_cached(s, &r, buffer)) {
            memmove(sorted + n_left, r.sorted, r.n * sizeof *sorted);
            n_left += r.n;
        }
    }
    return n_left;
}

static bool is_file(const llmaas_knn_rows * file) {
    return file && file->n_dims > 0 && file->n_dims <= LLMAAS_KNN_MAX_DIMS && file->n_rows <= INT32_MAX &&
           file->offset <= INT64_MAX / 2 && file->sums;
}

static bool are_rows(const llmaas_knn_rows * file, const int32_t * rows, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
        if (rows[i] < 0 || (uint64_t) rows[i] >= file->n_rows) {
            return false;
        }
    }
    return true;
}

llmaas_status llmaas_knn_sum(const uint8_t * keys, uint64_t n, uint32_t n_dims, uint32_t * sums) {
    if (n_dims == 0 || n_dims > LLMAAS_KNN_MAX_DIMS || n > INT32_MAX || (n && (!keys || !sums))) {
        return LLMAAS_EINVAL;
    }
    for (uint64_t i = 0; i < n; ++i) {
        sums[i] = llmaas_crc32c(0, keys + i * 2 * n_dims, 2 * (size_t) n_dims);
    }
    return LLMAAS_OK;
}

llmaas_status llmaas_knn_rescore(
    const llmaas_knn_rows * file, const int32_t * rows, uint32_t n, const float * query, float * distances) {
    if (!is_file(file) || n > LLMAAS_KNN_MAX_BEST || !query || (n && (!rows || !distances)) || !are_rows(file, rows, n)) {
        return LLMAAS_EINVAL;
    }
    uint64_t sorted[LLMAAS_KNN_MAX_BEST];
    uint8_t  buffer[BUFFER];
    for (uint32_t i = 0; i < n; ++i) {
        sorted[i] = (uint64_t) (uint32_t) rows[i] << 32 | i;
    }
    qsort(sorted, n, sizeof *sorted, by_row);
    rescoring s = {.file = file, .row_bytes = 2 * (size_t) file->n_dims, .query = query, .distances = distances};
    const uint32_t n_left = measure_cached(&s, sorted, n, buffer);
    for (uint32_t i = 0; i < n_left;) {
        const run r = next_run(sorted + i, n_left - i, s.row_bytes);
        if (!read_run(&s, &r, buffer)) {
            return LLMAAS_EIO;
        }
        i += r.n;
    }
    return s.is_damaged ? LLMAAS_ECORRUPT : LLMAAS_OK;
}
