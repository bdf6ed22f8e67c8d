#include "llmaas/knn.h"

#include "../kernels/kernels.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { BUFFER = 64 << 10 }; /* rows that are neighbours in the file are read in one call, if they fit here */

typedef struct rescoring {
    int fd;
    uint64_t offset;
    uint32_t n_dims;
    const float * query;
    float * distances;
} rescoring;

/* A run of rows that follow each other in the file; places[i] is where the distance of its i-th row belongs. */
typedef struct run {
    uint64_t first;
    uint32_t n;
    const uint64_t * sorted; /* row in the high half, place in the low half */
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

static void measure(const rescoring * s, const run * r, const uint8_t * bytes) {
    for (uint32_t i = 0; i < r->n; ++i) {
        s->distances[(uint32_t) r->sorted[i]] =
            llmaas_k()->knn_distance(bytes + i * 2 * (size_t) s->n_dims, s->query, s->n_dims);
    }
}

/* Whether the run was in the page cache. If not, it is on its way afterwards. */
static bool try_cached(const rescoring * s, const run * r, uint8_t * buffer) {
    const size_t n_bytes = r->n * 2 * (size_t) s->n_dims;
    const uint64_t at = s->offset + r->first * 2 * s->n_dims;
    const struct iovec vector = {buffer, n_bytes};
    if (preadv2(s->fd, &vector, 1, (off_t) at, RWF_NOWAIT) == (ssize_t) n_bytes) {
        measure(s, r, buffer);
        return true;
    }
    posix_fadvise(s->fd, (off_t) at, (off_t) n_bytes, POSIX_FADV_WILLNEED);
    return false;
}

static bool read_run(const rescoring * s, const run * r, uint8_t * buffer) {
    const size_t n_bytes = r->n * 2 * (size_t) s->n_dims;
    const uint64_t at = s->offset + r->first * 2 * s->n_dims;
    for (size_t done = 0; done < n_bytes;) {
        const ssize_t n = pread(s->fd, buffer + done, n_bytes - done, (off_t) (at + done));
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

/* sorted shrinks to the runs that were not in the page cache, or those cannot be told. */
static uint32_t measure_cached(const rescoring * s, uint64_t * sorted, uint32_t n, uint8_t * buffer) {
    uint32_t n_left = 0;
    for (uint32_t i = 0; i < n;) {
        const run r = next_run(sorted + i, n - i, 2 * (size_t) s->n_dims);
        i += r.n;
        if (!try_cached(s, &r, buffer)) {
            memmove(sorted + n_left, r.sorted, r.n * sizeof *sorted);
            n_left += r.n;
        }
    }
    return n_left;
}

llmaas_status llmaas_knn_rescore(int fd, uint64_t offset, uint32_t n_dims, const int32_t * rows, uint32_t n,
                                 const float * query, float * distances) {
    if (n_dims == 0 || n_dims > LLMAAS_KNN_MAX_DIMS || n > LLMAAS_KNN_MAX_BEST || offset > INT64_MAX / 2 || !query ||
        (n && (!rows || !distances))) {
        return LLMAAS_EINVAL;
    }
    uint64_t sorted[LLMAAS_KNN_MAX_BEST];
    uint8_t  buffer[BUFFER];
    for (uint32_t i = 0; i < n; ++i) {
        if (rows[i] < 0) {
            return LLMAAS_EINVAL;
        }
        sorted[i] = (uint64_t) (uint32_t) rows[i] << 32 | i;
    }
    qsort(sorted, n, sizeof *sorted, by_row);
    const rescoring s = {fd, offset, n_dims, query, distances};
    const uint32_t n_left = measure_cached(&s, sorted, n, buffer);
    for (uint32_t i = 0; i < n_left;) {
        const run r = next_run(sorted + i, n_left - i, 2 * (size_t) n_dims);
        if (!read_run(&s, &r, buffer)) {
            return LLMAAS_EIO;
        }
        i += r.n;
    }
    return LLMAAS_OK;
}
