/* Gathering: each piece gets its own bytes, however they are read. */
#include "check.h"

#include "stream/gather.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FILE_BYTES = 24 << 20, MAX_PIECES = 4096 };

static char * content;
static char * got;

static int file_new(void) {
    char name[] = "/tmp/llmaas-gather-XXXXXX";
    const int made = mkstemp(name);
    CHECK(made >= 0 && write(made, content, FILE_BYTES) == FILE_BYTES);
    int fd = open(name, O_RDONLY | O_DIRECT | O_CLOEXEC);
    fd = fd < 0 ? open(name, O_RDONLY | O_CLOEXEC) : fd;
    CHECK(fd >= 0 && close(made) == 0 && unlink(name) == 0);
    return fd;
}

/* Gather pieces of `size` bytes, `step` apart on average. Return the bytes read. */
static uint64_t check_pieces(llmaas_windows * windows, int fd, uint32_t size, uint32_t step) {
    static llmaas_gathered pieces[MAX_PIECES];
    uint64_t at = rnd() % 5000, n_read = 0;
    size_t   n = 0;
    while (n < MAX_PIECES && at + size <= FILE_BYTES) {
        pieces[n] = (llmaas_gathered) {at, size, got + at};
        at += size + rnd() % (2 * (step - size) + 1);
        n++;
    }
    memset(got, 0, FILE_BYTES);
    CHECK(llmaas_gather(windows, fd, pieces, n, &n_read));
    for (size_t i = 0; i < n; i++) {
        CHECK(memcmp(content + pieces[i].offset, pieces[i].to, size) == 0);
    }
    return n_read;
}

static llmaas_windows * windows_new(uint32_t depth, uint32_t n_bytes, int32_t n_gap) {
    llmaas_windows * windows = llmaas_windows_new(&(llmaas_reading) {depth, n_bytes, n_gap}, depth, false);
    CHECK(windows);
    return windows;
}

static void test_pieces(int fd) {
    llmaas_windows * windows = windows_new(64, 256 << 10, 12 << 10);
    CHECK(check_pieces(windows, fd, 1024, 1024) < 4096 * 1024 + 64 * 4096); /* adjacent: read once */
    CHECK(check_pieces(windows, fd, 1000, 5000) > 4000ull * 4900);          /* small gaps are read, too */
    CHECK(check_pieces(windows, fd, 1000, 60000) < 420 * 24000);            /* large gaps are not */
    CHECK(check_pieces(windows, fd, 300000, 400000) > 300000);              /* longer than a normal read */
    CHECK(check_pieces(windows, fd, 5 << 20, 6 << 20) > 5 << 20);           /* longer than the ring was */
    llmaas_windows_free(windows);
    windows = windows_new(3, 256 << 10, 0);
    CHECK(check_pieces(windows, fd, 512, 9000) < 3000 * 8192ull); /* nothing in between */
    llmaas_windows_free(windows);
    windows = windows_new(LLMAAS_IO_MAX_DEPTH, 4096, 1 << 20);
    CHECK(check_pieces(windows, fd, 4000, 4096) > 4096 * 4096ull); /* each piece separately, one page or two */
    llmaas_windows_free(windows);
    windows = windows_new(2, 16 << 20, 12 << 10);
    CHECK(check_pieces(windows, fd, 5000, 5000) <= (20 << 20) + 4 * 4096); /* two reads, longer than the normal ring */
    CHECK(llmaas_gather_memory(windows) == 16 << 20);
    llmaas_windows_free(windows);
    llmaas_windows_free(NULL);
}

/* Check a file that ends too early; later reads work as usual. */
static void test_short_file(int fd) {
    llmaas_windows * windows = windows_new(64, 256 << 10, 12 << 10);
    llmaas_gathered  pieces[100];
    uint64_t         n_read = 0;
    for (size_t i = 0; i < 100; i++) {
        pieces[i] = (llmaas_gathered) {FILE_BYTES - 50 * 20000 + i * 20000, 100, got};
    }
    CHECK(!llmaas_gather(windows, fd, pieces, 100, &n_read));
    CHECK(check_pieces(windows, fd, 100, 20000) > 0);
    CHECK(!llmaas_gather(windows, -1, pieces, 1, &n_read));
    CHECK(llmaas_gather(windows, fd, NULL, 0, &n_read));
    llmaas_windows_free(windows);
}

int main(void) {
    content = malloc(FILE_BYTES);
    got     = malloc(FILE_BYTES);
    CHECK(content && got);
    for (size_t i = 0; i < FILE_BYTES; i++) {
        content[i] = (char) rnd();
    }
    const int fd = file_new();
    test_pieces(fd);
    test_short_file(fd);
    close(fd);
    free(content);
    free(got);
    return 0;
}
