/* Fault injection, preloaded into a test's process. It counts every operation on files below one directory, and makes
 * the n-th one fail. It sits between the process and libc, so it reaches the slab's I/O in C, Python's and SQLite's
 * alike.
 *
 * faults_arm() starts counting at 0; disarmed, everything passes through. A power cut undoes what was written since a
 * file's last fsync, all of it or a part chosen by the seed, and then ends the process. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { SHORT = -1, TEAR_BLOCKS = -2, TEAR_BYTES = -3, KILL_BEFORE = -4, KILL_AFTER = -5, POWER_ALL = -6, POWER_PART = -7 };
enum { MAX_OPS = 1 << 16, MAX_UNDO = 1 << 14 };

typedef struct undo {
    int      fd; /* our own, never closed: closing it would drop SQLite's locks */
    ino_t    ino;
    off_t    offset, old_size;
    size_t   n; /* old bytes */
    uint8_t * bytes;
    bool     durable;
} undo;

static struct {
    bool     armed, sticky;
    int      kind; /* an errno, or one of the constants above */
    long     at, count;
    uint64_t seed;
    char     directory[4096];
    char     ops[MAX_OPS][32];
    undo     undos[MAX_UNDO];
    int      n_undos;
    long     clock_step, clock_reads;
} state;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

EXPORT void faults_arm(const char * directory, int kind, long at, int sticky, unsigned long seed) {
    snprintf(state.directory, sizeof state.directory, "%s/", directory);
    state.kind    = kind;
    state.at      = at;
    state.sticky  = sticky != 0;
    state.seed    = seed;
    state.count   = 0;
    state.n_undos = 0;
    state.armed   = true;
}

EXPORT long faults_disarm(void) {
    state.armed = false;
    return state.count;
}

EXPORT const char * faults_op(long i) { return i >= 0 && i < MAX_OPS ? state.ops[i] : ""; }

/* From now on, shift each reading of the wall clock, alternately forward by `step` seconds and back by half of it. */
EXPORT void faults_clock(long step) { state.clock_step = step; }

#define REAL(name, type) ((type) real(#name))

static void * real(const char * name) {
    void * found = dlsym(RTLD_NEXT, name);
    if (!found) {
        abort();
    }
    return found;
}

typedef ssize_t (*rw_call)(int, void *, size_t, off_t);
typedef ssize_t (*vec_call)(int, const struct iovec *, int, off_t);

static bool is_ours(const char * path) {
    const size_t n = strlen(state.directory);
    return state.armed && path && strncmp(path, state.directory, n) == 0;
}

static bool path_of(int fd, char * path, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, size - 1);
    path[n > 0 ? n : 0] = '\0';
    return n > 0;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    _exit(99);
}

static void power_cut(void) {
    for (int i = state.n_undos - 1; i >= 0; --i) {
        const undo * u = &state.undos[i];
        state.seed = state.seed * 6364136223846793005ull + 1442695040888963407ull;
        const bool kept = state.kind == POWER_PART && (state.seed >> 33 & 1);
        if (u->durable || kept) {
            continue;
        }
        const off_t most = u->old_size > u->offset ? u->old_size - u->offset : 0;
        const size_t n = (off_t) u->n < most ? u->n : (size_t) most;
        if (n && REAL(pwrite64, ssize_t (*)(int, const void *, size_t, off_t))(u->fd, u->bytes, n, u->offset) < 0) {
            abort();
        }
        struct stat now;
        if (fstat(u->fd, &now) == 0 && now.st_size != u->old_size && state.kind == POWER_ALL) {
            if (REAL(ftruncate64, int (*)(int, off_t))(u->fd, u->old_size) != 0) {
                abort();
            }
        }
    }
    die();
}

/* Return what the operation must do: 0 proceed, an errno, SHORT or a TEAR. Die here if that was requested. */
static int next_op(const char * op, const char * path) {
    pthread_mutex_lock(&lock);
    const long i = state.count++;
    const char * name = strrchr(path, '/');
    if (i < MAX_OPS) {
        snprintf(state.ops[i], sizeof state.ops[i], "%s %s", op, name ? name + 1 : path);
    }
    const bool hit = i == state.at || (state.sticky && i > state.at);
    pthread_mutex_unlock(&lock);
    if (!hit) {
        return 0;
    }
    if (state.kind == KILL_BEFORE) {
        die();
    }
    if (state.kind == POWER_ALL || state.kind == POWER_PART) {
        power_cut();
    }
    return state.kind;
}

static void after_op(int verdict) {
    if (verdict == KILL_AFTER || verdict == TEAR_BLOCKS || verdict == TEAR_BYTES) {
        die();
    }
}

/* Save what a change of [offset, offset + n) will overwrite. */
static void remember(int fd, off_t offset, size_t n) {
    if (state.kind != POWER_ALL && state.kind != POWER_PART) {
        return;
    }
    pthread_mutex_lock(&lock);
    struct stat found;
    if (state.n_undos == MAX_UNDO || fstat(fd, &found) != 0) {
        abort();
    }
    undo * u = &state.undos[state.n_undos++];
    *u = (undo) {.fd = -1, .ino = found.st_ino, .offset = offset, .old_size = found.st_size};
    for (int i = 0; i < state.n_undos - 1 && u->fd < 0; ++i) {
        u->fd = state.undos[i].ino == u->ino ? state.undos[i].fd : -1;
    }
    if (u->fd < 0) {
        char path[4096];
        path_of(fd, path, sizeof path);
        u->fd = REAL(open64, int (*)(const char *, int, ...))(path, O_RDWR | O_CLOEXEC);
    }
    u->bytes = malloc(n ? n : 1);
    const ssize_t got = REAL(pread64, rw_call)(u->fd, u->bytes, n, offset);
    u->n = got > 0 ? (size_t) got : 0;
    pthread_mutex_unlock(&lock);
}

static void synced(int fd) {
    struct stat found;
    if (fstat(fd, &found) == 0) {
        for (int i = 0; i < state.n_undos; ++i) {
            state.undos[i].durable |= state.undos[i].ino == found.st_ino;
        }
    }
}

static size_t part_of(int verdict, size_t n) {
    if (verdict == SHORT || verdict == TEAR_BYTES) {
        return n / 2 + (n & 1);
    }
    return n / 2 / 512 * 512;
}

static ssize_t fail(int code) {
    errno = code;
    return -1;
}

static bool watched(int fd, char * path, size_t size) {
    return state.armed && path_of(fd, path, size) && is_ours(path);
}

/* Write a piece through a separate descriptor, since O_DIRECT would refuse odd sizes. */
static ssize_t write_piece(const char * path, const struct iovec * iov, int n_iov, off_t offset, size_t most) {
    const int fd = REAL(open64, int (*)(const char *, int, ...))(path, O_WRONLY | O_CLOEXEC);
    ssize_t done = 0;
    for (int i = 0; i < n_iov && (size_t) done < most; ++i) {
        const size_t left = most - (size_t) done, n = iov[i].iov_len < left ? iov[i].iov_len : left;
        if (REAL(pwrite64, ssize_t (*)(int, const void *, size_t, off_t))(fd, iov[i].iov_base, n, offset + done) !=
            (ssize_t) n) {
            abort();
        }
        done += (ssize_t) n;
    }
    return done; /* fd stays open, for SQLite's locks */
}

static ssize_t write_at(int fd, const struct iovec * iov, int n_iov, off_t offset, const char * op) {
    char path[4096];
    const vec_call call = REAL(pwritev64, vec_call);
    if (!watched(fd, path, sizeof path)) {
        return call(fd, iov, n_iov, offset);
    }
    size_t total = 0;
    for (int i = 0; i < n_iov; ++i) {
        total += iov[i].iov_len;
    }
    const int verdict = next_op(op, path);
    if (verdict > 0) {
        return fail(verdict);
    }
    remember(fd, offset, total);
    ssize_t n;
    if (verdict == SHORT || verdict == TEAR_BLOCKS || verdict == TEAR_BYTES) {
        size_t most = part_of(verdict, total);
        if (verdict == SHORT && total >= 8192) {
            most = most / 4096 * 4096; /* a multiple of 4096, so that the rest can continue with O_DIRECT, as with a
                                        * real device */
        } else if (verdict == SHORT && (fcntl(fd, F_GETFL) & O_DIRECT)) {
            most = total;
        }
        n = write_piece(path, iov, n_iov, offset, most);
    } else {
        n = call(fd, iov, n_iov, offset);
    }
    after_op(verdict);
    return n;
}

static ssize_t read_at(int fd, const struct iovec * iov, int n_iov, off_t offset, const char * op) {
    char path[4096];
    const vec_call call = REAL(preadv64, vec_call);
    if (!watched(fd, path, sizeof path)) {
        return call(fd, iov, n_iov, offset);
    }
    const int verdict = next_op(op, path);
    if (verdict > 0) {
        return fail(verdict);
    }
    const ssize_t n = call(fd, iov, n_iov, offset);
    after_op(verdict);
    return n;
}

#define ONE(buf, n) (&(struct iovec) {(void *) (uintptr_t) (buf), n})

EXPORT ssize_t pwrite64(int fd, const void * buf, size_t n, off_t at) { return write_at(fd, ONE(buf, n), 1, at, "pwrite"); }
EXPORT ssize_t pwrite(int fd, const void * buf, size_t n, off_t at) { return pwrite64(fd, buf, n, at); }
EXPORT ssize_t pwritev64(int fd, const struct iovec * v, int n, off_t at) { return write_at(fd, v, n, at, "pwritev"); }
EXPORT ssize_t pwritev(int fd, const struct iovec * v, int n, off_t at) { return pwritev64(fd, v, n, at); }
EXPORT ssize_t pread64(int fd, void * buf, size_t n, off_t at) { return read_at(fd, ONE(buf, n), 1, at, "pread"); }
EXPORT ssize_t pread(int fd, void * buf, size_t n, off_t at) { return pread64(fd, buf, n, at); }
EXPORT ssize_t preadv64(int fd, const struct iovec * v, int n, off_t at) { return read_at(fd, v, n, at, "preadv"); }
EXPORT ssize_t preadv(int fd, const struct iovec * v, int n, off_t at) { return preadv64(fd, v, n, at); }
/* Called by Python only; it never passes flags. */
EXPORT ssize_t preadv64v2(int fd, const struct iovec * v, int n, off_t at, int flags) {
    (void) flags;
    return preadv64(fd, v, n, at);
}
/* Called by our library; its flag only says that it need not wait. */
EXPORT ssize_t preadv2(int fd, const struct iovec * v, int n, off_t at, int flags) {
    (void) flags;
    return read_at(fd, v, n, at, "preadv2");
}

/* Refuse io_uring, whose reads would not pass here, so that threads read instead. */
EXPORT long syscall(long number, ...) {
    long    args[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; ++i) {
        args[i] = va_arg(rest, long);
    }
    va_end(rest);
    if (number == SYS_io_uring_setup) {
        return fail(ENOSYS);
    }
    return REAL(syscall, long (*)(long, ...))(number, args[0], args[1], args[2], args[3], args[4], args[5]);
}

EXPORT ssize_t write(int fd, const void * buf, size_t n) {
    char path[4096];
    if (!watched(fd, path, sizeof path)) {
        return REAL(write, ssize_t (*)(int, const void *, size_t))(fd, buf, n);
    }
    const off_t at = lseek(fd, 0, SEEK_CUR);
    const ssize_t done = write_at(fd, ONE(buf, n), 1, at, "write");
    if (done > 0) {
        lseek(fd, at + done, SEEK_SET);
    }
    return done;
}

/* All other operations succeed or fail as a whole. */
#define WHOLE(op, path, undo, call)                 \
    const int verdict = next_op(op, path);          \
    if (verdict > 0) {                              \
        return (int) fail(verdict);                 \
    }                                               \
    undo;                                           \
    const int result = call;                        \
    after_op(verdict);                              \
    return result

EXPORT int ftruncate64(int fd, off_t size) {
    char path[4096];
    int (*call)(int, off_t) = REAL(ftruncate64, int (*)(int, off_t));
    if (!watched(fd, path, sizeof path)) {
        return call(fd, size);
    }
    struct stat now = {0};
    fstat(fd, &now);
    WHOLE("ftruncate", path, remember(fd, size, now.st_size > size ? (size_t) (now.st_size - size) : 0), call(fd, size));
}
EXPORT int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

EXPORT int fallocate64(int fd, int mode, off_t at, off_t n) {
    char path[4096];
    int (*call)(int, int, off_t, off_t) = REAL(fallocate64, int (*)(int, int, off_t, off_t));
    if (!watched(fd, path, sizeof path)) {
        return call(fd, mode, at, n);
    }
    WHOLE("fallocate", path, remember(fd, at, (size_t) n), call(fd, mode, at, n));
}
EXPORT int fallocate(int fd, int mode, off_t at, off_t n) { return fallocate64(fd, mode, at, n); }

#define SYNC(name)                                           \
    EXPORT int name(int fd) {                                \
        char path[4096];                                     \
        int (*call)(int) = REAL(name, int (*)(int));         \
        if (!watched(fd, path, sizeof path)) {               \
            return call(fd);                                 \
        }                                                    \
        WHOLE("sync", path, synced(fd), 0);                  \
    }
SYNC(fsync)
SYNC(fdatasync)

EXPORT int open64(const char * path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    const int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
    va_end(rest);
    int (*call)(const char *, int, ...) = REAL(open64, int (*)(const char *, int, ...));
    if (!is_ours(path)) {
        return call(path, flags, mode);
    }
    WHOLE("open", path, , call(path, flags, mode));
}
EXPORT int open(const char * path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    const int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
    va_end(rest);
    return open64(path, flags, mode);
}

EXPORT int unlink(const char * path) {
    int (*call)(const char *) = REAL(unlink, int (*)(const char *));
    if (!is_ours(path)) {
        return call(path);
    }
    WHOLE("unlink", path, , call(path));
}

EXPORT int rename(const char * from, const char * to) {
    int (*call)(const char *, const char *) = REAL(rename, int (*)(const char *, const char *));
    if (!is_ours(from)) {
        return call(from, to);
    }
    WHOLE("rename", from, , call(from, to));
}

EXPORT int clock_gettime(clockid_t clock, struct timespec * found) {
    const int result = REAL(clock_gettime, int (*)(clockid_t, struct timespec *))(clock, found);
    if (result == 0 && clock == CLOCK_REALTIME && state.clock_step) {
        found->tv_sec += ++state.clock_reads % 2 ? state.clock_step : -state.clock_step / 2;
    }
    return result;
}
EXPORT time_t time(time_t * out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) {
        *out = now.tv_sec;
    }
    return now.tv_sec;
}
EXPORT int gettimeofday(struct timeval * restrict out, void * restrict zone) {
    struct timespec now;
    (void) zone;
    clock_gettime(CLOCK_REALTIME, &now);
    *out = (struct timeval) {now.tv_sec, now.tv_nsec / 1000};
    return 0;
}
