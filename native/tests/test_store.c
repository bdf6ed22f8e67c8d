/* Batched I/O on real files: adjacency, padding, short files, wrong keys, errors. */
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

enum { N = 40, N_CELLS = 64 };

static const uint64_t rows[] = {6144, 6144};
static const llmaas_kv_geom geom = {2, 0, LLMAAS_TYPE_F16, LLMAAS_TYPE_F16, rows, rows, 0};

static uint8_t  keys[N][32];
static uint8_t * payloads[N];
static uint64_t offsets[N], lengths[N];

static uint64_t blocks(uint64_t n) { return (n + 4095) / 4096 * 4096; }

/* What the contract asks for: whole blocks on a block boundary, zero behind the payload. */
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
        at += i % 10 == 9 ? 8192 : 0; /* a hole ends a run */
        offsets[i] = at;
        at += blocks(got);
    }
    CHECK(lengths[20] > LLMAAS_RECORD_MAX);
    free(blob);
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
    CHECK(stats.bytes == bytes && stats.n_calls < N && stats.n_calls >= bytes / LLMAAS_RECORD_MAX && stats.sys_errno == 0);
    CHECK(lseek(fd, 0, SEEK_END) == (off_t) (offsets[N - 1] + blocks(lengths[N - 1])));
    CHECK(llmaas_store_read(fd, N, offsets, lengths, out, (const uint8_t(*)[32]) keys, statuses, &stats) == LLMAAS_OK);
    CHECK(stats.n_calls < N);
    for (uint32_t i = 0; i < N; ++i) {
        CHECK(statuses[i] == LLMAAS_OK && memcmp(out[i], payloads[i], blocks(lengths[i])) == 0);
    }
    keys[3][5] = 1; /* another key, a damaged byte, a file that ends inside a run */
    const uint8_t byte = (uint8_t) ~payloads[4][500];
    CHECK(pwrite(fd, &byte, 1, (off_t) offsets[4] + 500) == 1);
    CHECK(ftruncate(fd, (off_t) (offsets[30] + lengths[30] - 1)) == 0);
    CHECK(llmaas_store_read(fd, N, offsets, lengths, out, (const uint8_t(*)[32]) keys, statuses, &stats) == LLMAAS_OK);
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
    const int full = open("/dev/full", O_WRONLY); /* no holes there, so zeros, for which it has no room either */
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
    CHECK(llmaas_store_read(fd, 1, &odd, lengths, &out, k, &status, &stats) == LLMAAS_EINVAL);
    CHECK(llmaas_store_read(fd, 1, &huge, lengths, &out, k, &status, &stats) == LLMAAS_EINVAL);
    CHECK(llmaas_store_read(fd, 1, offsets, &zero, &out, k, &status, &stats) == LLMAAS_EINVAL);
    uint8_t * askew = out + 512;
    const uint8_t * const askew_src = askew;
    CHECK(llmaas_store_read(fd, 1, offsets, lengths, &askew, k, &status, &stats) == LLMAAS_EINVAL);
    CHECK(llmaas_store_write(fd, 1, offsets, lengths, &askew_src, &stats) == LLMAAS_EINVAL);
    CHECK(llmaas_store_read(-1, 1, offsets, lengths, &out, k, &status, &stats) == LLMAAS_EINVAL);
    CHECK(llmaas_store_read(fd, 0, NULL, NULL, NULL, NULL, NULL, &stats) == LLMAAS_OK && stats.n_calls == 0);
    const int closed = dup(fd);
    close(closed);
    CHECK(llmaas_store_read(closed, 1, offsets, lengths, &out, k, &status, &stats) == LLMAAS_OK);
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
    close(fd);
    for (uint32_t i = 0; i < N; ++i) {
        free(payloads[i]);
    }
    return 0;
}
