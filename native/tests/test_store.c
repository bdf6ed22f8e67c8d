/* Batched I/O on real files: neighbors, gaps, any order, padding, short files, wrong keys, errors. */
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

enum { N = 40, N_CELLS = 64 };

static const uint64_t rows[] = {6144, 6144};
static const llmaas_kv_geom geom = {2, 0, LLMAAS_TYPE_F16, LLMAAS_TYPE_F16, rows, rows, 0};

static uint8_t  keys[N][32];
static uint8_t * payloads[N];
static uint64_t offsets[N], lengths[N];

static uint64_t blocks(uint64_t n) { return (n + 4095) / 4096 * 4096; }

/* Allocate as the contract requires: whole blocks on a block boundary, zero behind the payload. */
static uint8_t * whole_blocks(uint64_t n) {
    uint8_t * p = aligned_alloc(4096, blocks(n));
    CHECK(p != NULL);
    memset(p, 0, blocks(n));
    return p;
}

static int temp_file(void) {
    char path[] = "/tmp/llmaas-store-XXXXXX";
    const int fd = mkstemp(path);
    CHECK(fd >= 0 && unlink(path) == 0);
    return fd;
}

static void make_payloads(void) {
    int32_t pos[N_CELLS] = {0};
    const size_t size = llmaas_blob_size(&geom, N_CELLS);
    uint8_t * blob = exact(size);
    fill_like_kv(blob, size / 2);
    CHECK(llmaas_blob_init(&geom, blob, size, pos, N_CELLS) == LLMAAS_OK);
    uint64_t at = 0;
    for (uint32_t i = 0; i < N; ++i) {
        const uint32_t n   = i == 20 ? 60 : 1 + i % 16; /* one is longer than a record */
        const size_t   cap = llmaas_chunk_bound(&geom, LLMAAS_CODEC_RAW, 0, n);
        size_t got = 0;
        keys[i][0]  = (uint8_t) i;
        payloads[i] = whole_blocks(cap);
        CHECK(llmaas_chunk_encode(&geom, 0, 0, blob, size, N_CELLS, 0, n, keys[i], payloads[i], cap, &got) == LLMAAS_OK);
        lengths[i] = got;
        at += i % 10 == 9 ? 8192 : 0; /* a hole ends a run of writes */
        offsets[i] = at;
        at += blocks(got);
    }
    CHECK(lengths[20] > LLMAAS_RECORD_MAX);
    free(blob);
}

/* Return the calls needed if neighbors share calls of up to 1 MiB of payloads. */
static uint64_t calls_over(uint64_t gap) {
    uint64_t n_calls = 0, total = 0, end = 0;
    for (uint32_t i = 0; i < N; ++i) {
        if (i == 0 || offsets[i] - end > gap || total + lengths[i] > LLMAAS_RECORD_MAX) {
            total = 0;
            n_calls++;
        }
        total += lengths[i];
        end = offsets[i] + blocks(lengths[i]);
    }
    return n_calls;
}

static void check_round_trip(int fd) {
    uint8_t * out[N];
    int32_t   statuses[N];
    llmaas_io_stats stats;
    for (uint32_t i = 0; i < N; ++i) {
        out[i] = whole_blocks(lengths[i]);
    }
    CHECK(llmaas_store_write(fd, N, offsets, lengths, (const uint8_t * const *) payloads, &stats) == LLMAAS_OK);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < N; ++i) {
        bytes += blocks(lengths[i]);
    }
    CHECK(stats.bytes == bytes && stats.n_calls == calls_over(0) && stats.sys_errno == 0);
    CHECK(lseek(fd, 0, SEEK_END) == (off_t) (offsets[N - 1] + blocks(lengths[N - 1])));
    CHECK(llmaas_store_read(fd, N, offsets, lengths, out, (const uint8_t(*)[32]) keys, false, statuses, &stats) == LLMAAS_OK);
    CHECK(stats.n_calls == calls_over(8192) && stats.n_calls < calls_over(0) && stats.bytes > bytes);
    for (uint32_t i = 0; i < N; ++i) {
        CHECK(statuses[i] == LLMAAS_OK && memcmp(out[i], payloads[i], blocks(lengths[i])) == 0);
    }
    keys[3][5] = 1; /* another key, a damaged byte, a file that ends inside a run */
    const uint8_t byte = (uint8_t) ~payloads[4][500];
    CHECK(pwrite(fd, &byte, 1, (off_t) offsets[4] + 500) == 1);
    CHECK(ftruncate(fd, (off_t) (offsets[30] + lengths[30] - 1)) == 0);
    CHECK(llmaas_store_read(fd, N, offsets, lengths, out, (const uint8_t(*)[32]) keys, false, statuses, &stats) == LLMAAS_OK);
    for (uint32_t i = 0; i < N; ++i) {
        const int32_t want = i == 3 ? LLMAAS_ESTALE : i == 4 ? LLMAAS_ECORRUPT : i >= 30 ? LLMAAS_EIO : LLMAAS_OK;
        CHECK(statuses[i] == want);
    }
    CHECK(stats.sys_errno == 0);
    keys[3][5] = 0;
    for (uint32_t i = 0; i < N; ++i) {
        free(out[i]);
    }
}

enum { MANY = 300 };

/* Copies of one small payload at many places, a fixed distance apart. */
typedef struct copies {
    int       fd;
    uint64_t  offsets[MANY], lengths[MANY];
    uint8_t * payload;
    uint8_t * out[MANY];
    uint8_t   keys[MANY][32];
} copies;

static copies * copies_new(uint32_t n, uint64_t gap) {
    static const uint64_t row = 64;
    const llmaas_kv_geom  small = {1, 0, LLMAAS_TYPE_F16, LLMAAS_TYPE_F16, &row, &row, 0};
    const int32_t pos[N_CELLS] = {0};
    const size_t  size = llmaas_blob_size(&small, N_CELLS);
    uint8_t *     blob = exact(size);
    copies *      c    = calloc(1, sizeof *c);
    CHECK(c != NULL);
    fill_like_kv(blob, size / 2);
    CHECK(llmaas_blob_init(&small, blob, size, pos, N_CELLS) == LLMAAS_OK);
    const size_t cap = llmaas_chunk_bound(&small, LLMAAS_CODEC_RAW, 0, 16);
    size_t       got = 0;
    c->payload = whole_blocks(cap);
    CHECK(llmaas_chunk_encode(&small, 0, 0, blob, size, N_CELLS, 0, 16, c->keys[0], c->payload, cap, &got) == LLMAAS_OK);
    CHECK(blocks(got) == LLMAAS_STORE_BLOCK);
    c->fd = temp_file();
    for (uint32_t i = 0; i < n; ++i) {
        c->offsets[i] = i * (LLMAAS_STORE_BLOCK + gap);
        c->lengths[i] = got;
        c->out[i]     = whole_blocks(got);
        CHECK(pwrite(c->fd, c->payload, got, (off_t) c->offsets[i]) == (ssize_t) got);
    }
    CHECK(ftruncate(c->fd, (off_t) (c->offsets[n - 1] + LLMAAS_STORE_BLOCK)) == 0);
    free(blob);
    return c;
}

static void copies_free(copies * c) {
    for (uint32_t i = 0; i < MANY; ++i) {
        free(c->out[i]);
    }
    close(c->fd);
    free(c->payload), free(c);
}

/* Read the first n copies and return the system calls made. Check that each of the first n_there can be read and no
 * other can. */
static uint64_t copies_read_as(copies * c, uint32_t n, uint32_t n_there, bool is_ahead, uint64_t * bytes) {
    int32_t         statuses[MANY];
    llmaas_io_stats stats;
    for (uint32_t i = 0; i < n; ++i) {
        memset(c->out[i], 0, c->lengths[i]);
    }
    CHECK(llmaas_store_read(c->fd, n, c->offsets, c->lengths, c->out, (const uint8_t(*)[32]) c->keys, is_ahead, statuses,
                            &stats) == LLMAAS_OK);
    for (uint32_t i = 0; i < n; ++i) {
        CHECK(statuses[i] == (i < n_there ? LLMAAS_OK : LLMAAS_EIO));
        CHECK(i >= n_there || memcmp(c->out[i], c->payload, c->lengths[i]) == 0);
    }
    *bytes = stats.bytes;
    return stats.n_calls;
}

static uint64_t copies_read(copies * c, uint32_t n, uint32_t n_there, uint64_t * bytes) {
    uint64_t       bytes_ahead = 0;
    const uint64_t n_ahead = copies_read_as(c, n, n_there, true, &bytes_ahead);
    const uint64_t n_calls = copies_read_as(c, n, n_there, false, bytes);
    CHECK(n_ahead == n_calls && bytes_ahead == *bytes);
    return n_calls;
}

static void shuffle(copies * c, uint32_t n) {
    for (uint32_t i = n - 1; i > 0; --i) {
        const uint32_t j = rnd_below(i + 1);
        const uint64_t was = c->offsets[i];
        c->offsets[i] = c->offsets[j];
        c->offsets[j] = was;
    }
}

static void check_gaps(void) {
    const uint64_t gaps[] = {0, LLMAAS_STORE_BLOCK, LLMAAS_STORE_GAP, LLMAAS_STORE_GAP + LLMAAS_STORE_BLOCK};
    for (int g = 0; g < 4; ++g) {
        const bool one_call = gaps[g] <= LLMAAS_STORE_GAP;
        uint64_t   bytes    = 0;
        copies *   c        = copies_new(MANY, gaps[g]);
        CHECK(copies_read(c, 1, 1, &bytes) == 1 && bytes == LLMAAS_STORE_BLOCK);
        for (int round = 0; round < 3; ++round) {
            CHECK(copies_read(c, 100, 100, &bytes) == (one_call ? 1 : 100));
            CHECK(bytes == 100 * LLMAAS_STORE_BLOCK + (one_call ? 99 * gaps[g] : 0));
            shuffle(c, 100); /* the order does not matter */
        }
        CHECK(copies_read(c, MANY, MANY, &bytes) == (one_call ? 2 : MANY)); /* 256 at a time */
        shuffle(c, MANY);
        CHECK(copies_read(c, MANY, MANY, &bytes) <= MANY);
        copies_free(c);
    }
}

static void check_odd_places(void) {
    uint64_t bytes = 0;
    copies * c     = copies_new(4, LLMAAS_STORE_BLOCK);
    c->offsets[3] = c->offsets[0]; /* the same one twice */
    CHECK(copies_read(c, 4, 4, &bytes) == 2);
    c->lengths[0] += 1; /* longer than the payload */
    int32_t         statuses[3];
    llmaas_io_stats stats;
    CHECK(llmaas_store_read(c->fd, 3, c->offsets, c->lengths, c->out, (const uint8_t(*)[32]) c->keys, false, statuses, &stats) ==
          LLMAAS_OK);
    CHECK(statuses[0] == LLMAAS_ECORRUPT && statuses[1] == LLMAAS_OK && statuses[2] == LLMAAS_OK && stats.n_calls == 1);
    c->lengths[0] -= 1;
    CHECK(ftruncate(c->fd, (off_t) (c->offsets[1] + LLMAAS_STORE_BLOCK + 512)) == 0); /* ends within a gap */
    CHECK(copies_read(c, 3, 2, &bytes) == 1 && bytes == 3 * LLMAAS_STORE_BLOCK + 512);
    copies_free(c);
}

/* Check many calls of which some fail: each payload has its own status. */
static void check_failures_among_many(void) {
    uint64_t bytes = 0;
    copies * c     = copies_new(MANY, LLMAAS_STORE_GAP + LLMAAS_STORE_BLOCK);
    CHECK(ftruncate(c->fd, (off_t) c->offsets[100] + 7) == 0);
    CHECK(copies_read(c, MANY, 100, &bytes) == 101 && bytes == 100 * LLMAAS_STORE_BLOCK + 7);
    const int fd = c->fd;
    c->fd = open("/", O_RDONLY | O_CLOEXEC);
    CHECK(c->fd >= 0 && copies_read(c, MANY, 0, &bytes) == 0 && bytes == 0);
    close(c->fd);
    c->fd = fd;
    copies_free(c);
}

enum { N_THREADS = 4, FAR_APART = 20 };

static void * read_far_apart(void * arg) {
    copies * c     = arg;
    uint64_t bytes = 0;
    for (int i = 0; i < 20; ++i) {
        CHECK(copies_read(c, FAR_APART, FAR_APART, &bytes) == FAR_APART);
    }
    return NULL;
}

/* Check threads that come and go, and a child of a process that has read. */
static void check_threads_and_fork(void) {
    copies *  all[N_THREADS];
    pthread_t threads[N_THREADS];
    for (int i = 0; i < N_THREADS; ++i) {
        all[i] = copies_new(FAR_APART, LLMAAS_STORE_GAP + LLMAAS_STORE_BLOCK);
        CHECK(pthread_create(&threads[i], NULL, read_far_apart, all[i]) == 0);
    }
    for (int i = 0; i < N_THREADS; ++i) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    read_far_apart(all[0]);
    const pid_t child = fork();
    if (child == 0) {
        read_far_apart(all[1]);
        _exit(0);
    }
    int status = -1;
    read_far_apart(all[0]);
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    for (int i = 0; i < N_THREADS; ++i) {
        copies_free(all[i]);
    }
}

static void check_writes_in_any_order(void) {
    copies *        c = copies_new(MANY, 0);
    const uint8_t * src[MANY];
    llmaas_io_stats stats;
    uint64_t        bytes = 0;
    for (uint32_t i = 0; i < MANY; ++i) {
        src[i] = c->payload;
    }
    shuffle(c, 200);
    CHECK(ftruncate(c->fd, 0) == 0);
    CHECK(llmaas_store_write(c->fd, 200, c->offsets, c->lengths, src, &stats) == LLMAAS_OK && stats.n_calls == 1);
    CHECK(copies_read(c, 200, 200, &bytes) == 1);
    for (uint32_t i = 0; i < 100; ++i) {
        c->offsets[i] = 2 * i * LLMAAS_STORE_BLOCK; /* bytes between them are not overwritten */
    }
    CHECK(llmaas_store_write(c->fd, 100, c->offsets, c->lengths, src, &stats) == LLMAAS_OK && stats.n_calls == 100);
    CHECK(stats.bytes == 100 * LLMAAS_STORE_BLOCK);
    copies_free(c);
}

static void check_erase(int fd) {
    const uint64_t at[] = {0, 8192}, n[] = {4096, 5000}, odd = 512, zero = 0;
    uint8_t page[4096], back[4 * 4096];
    memset(page, 0xa5, sizeof page);
    for (int i = 0; i < 5; ++i) {
        CHECK(pwrite(fd, page, sizeof page, i * 4096) == (ssize_t) sizeof page);
    }
    llmaas_io_stats stats;
    const off_t end = lseek(fd, 0, SEEK_END);
    CHECK(llmaas_store_erase(fd, 2, at, n, &stats) == LLMAAS_OK && stats.bytes == 3 * 4096 && stats.sys_errno == 0);
    CHECK(lseek(fd, 0, SEEK_END) == end);
    CHECK(pread(fd, back, sizeof back, 0) == (ssize_t) sizeof back);
    for (size_t i = 0; i < sizeof back; ++i) {
        CHECK(back[i] == (i / 4096 == 1 ? 0xa5 : 0));
    }
    CHECK(llmaas_store_erase(fd, 1, &odd, n, &stats) == LLMAAS_EINVAL);
    CHECK(llmaas_store_erase(fd, 1, at, &zero, &stats) == LLMAAS_EINVAL);
    CHECK(llmaas_store_erase(-1, 1, at, n, &stats) == LLMAAS_EINVAL);
    const int full = open("/dev/full", O_WRONLY); /* it supports neither holes nor writing zeros */
    if (full >= 0) {
        CHECK(llmaas_store_erase(full, 1, at, n, &stats) == LLMAAS_EIO && stats.sys_errno == ENOSPC);
        close(full);
    }
    const int null = open("/dev/null", O_WRONLY);
    CHECK(null >= 0 && llmaas_store_erase(null, 2, at, n, &stats) == LLMAAS_OK && stats.bytes == 3 * 4096);
    close(null);
}

static void check_errors(int fd) {
    llmaas_io_stats stats;
    int32_t   status = -1;
    uint8_t * out    = whole_blocks(lengths[0]);
    const uint8_t * const * src = (const uint8_t * const *) payloads;
    const uint8_t (*k)[32] = (const uint8_t(*)[32]) keys;
    const uint64_t odd = 512, zero = 0, huge = UINT64_MAX - 4095;
    CHECK(llmaas_store_read(fd, 1, &odd, lengths, &out, k, false, &status, &stats) == LLMAAS_EINVAL);
    CHECK(llmaas_store_read(fd, 1, &huge, lengths, &out, k, false, &status, &stats) == LLMAAS_EINVAL);
    CHECK(llmaas_store_read(fd, 1, offsets, &zero, &out, k, false, &status, &stats) == LLMAAS_EINVAL);
    uint8_t * askew = out + 512;
    const uint8_t * const askew_src = askew;
    CHECK(llmaas_store_read(fd, 1, offsets, lengths, &askew, k, false, &status, &stats) == LLMAAS_EINVAL);
    CHECK(llmaas_store_write(fd, 1, offsets, lengths, &askew_src, &stats) == LLMAAS_EINVAL);
    CHECK(llmaas_store_read(-1, 1, offsets, lengths, &out, k, false, &status, &stats) == LLMAAS_EINVAL);
    CHECK(llmaas_store_read(fd, 0, NULL, NULL, NULL, NULL, false, NULL, &stats) == LLMAAS_OK && stats.n_calls == 0);
    const int closed = dup(fd);
    close(closed);
    CHECK(llmaas_store_read(closed, 1, offsets, lengths, &out, k, false, &status, &stats) == LLMAAS_OK);
    CHECK(status == LLMAAS_EIO && stats.sys_errno == EBADF);
    const int full = open("/dev/full", O_WRONLY);
    if (full >= 0) {
        CHECK(llmaas_store_write(full, 1, offsets, lengths, src, &stats) == LLMAAS_EIO && stats.sys_errno == ENOSPC);
        close(full);
    }
    free(out);
}

int main(void) {
    make_payloads();
    const int fd = temp_file();
    check_round_trip(fd);
    check_errors(fd);
    check_erase(fd);
    check_gaps();
    check_odd_places();
    check_failures_among_many();
    check_threads_and_fork();
    check_writes_in_any_order();
    close(fd);
    for (uint32_t i = 0; i < N; ++i) {
        free(payloads[i]);
    }
    return 0;
}
