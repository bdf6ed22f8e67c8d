/* Asynchronous reads, with each kind of backend: contents, ends of files, errors, order, reads ahead, registered
 * memory, several threads. */
#include "check.h"

#include "io_backend.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BLOCK = 4096, N_BLOCKS = 300, TAIL = 777, FILE_BYTES = N_BLOCKS * BLOCK + TAIL, SLOT = 16 * BLOCK, DEPTH = 64 };

typedef struct context {
    llmaas_io_kind kind;
    int            fd;
    bool           is_direct, is_ahead;
    llmaas_io *    io;
    uint8_t *      memory; /* SLOT bytes for each read */
    llmaas_io_read reads[DEPTH];
} context;

extern atomic_uint llmaas_io_n_waiting;

static uint8_t * content; /* of the file; zeros follow it */

static void make_file(char * path) {
    const int fd = mkstemp(path);
    content = exact(FILE_BYTES + SLOT);
    memset(content + FILE_BYTES, 0, SLOT);
    fill_random(content, FILE_BYTES);
    CHECK(fd >= 0 && write(fd, content, FILE_BYTES) == FILE_BYTES);
    close(fd);
}

static llmaas_io * opened(llmaas_io_kind kind, uint32_t depth) {
    llmaas_io * io = NULL;
    CHECK(llmaas_io_open(kind, depth, &io) == LLMAAS_OK && llmaas_io_kind_of(io) == kind);
    return io;
}

/* Start a read of n_bytes, or of what the file has of them. */
static llmaas_io_read * start(context * c, uint32_t slot, uint64_t offset, uint32_t n_bytes) {
    const uint64_t   there = offset < FILE_BYTES ? FILE_BYTES - offset : 0;
    llmaas_io_read * read  = &c->reads[slot];
    *read = (llmaas_io_read) {
        .fd       = c->fd,
        .offset   = offset,
        .n_bytes  = n_bytes,
        .n_needed = there < n_bytes ? (uint32_t) there : n_bytes,
        .buffer   = c->memory + (size_t) slot * SLOT,
        .is_ahead = c->is_ahead,
        .error    = -1,
        .is_done  = true,
    };
    memset(read->buffer, 0xa5, n_bytes);
    CHECK(llmaas_io_start(c->io, read) == LLMAAS_OK && !read->is_done);
    return read;
}

static llmaas_io_read * start_any(context * c, uint32_t slot) {
    const uint32_t unit   = c->is_direct ? BLOCK : 1;
    const uint64_t offset = rnd_below(FILE_BYTES / unit) * unit;
    return start(c, slot, offset, (1 + rnd_below(SLOT / unit)) * unit);
}

static void check_got(const llmaas_io_read * read) {
    CHECK(read->is_done && read->error == 0);
    CHECK(memcmp(read->buffer, content + read->offset, read->n_needed) == 0);
}

static void check_drained(context * c, uint32_t n) {
    llmaas_io_drain(c->io);
    CHECK(llmaas_io_room(c->io) == DEPTH);
    for (uint32_t i = 0; i < n; ++i) {
        check_got(&c->reads[i]);
    }
}

/* -- contents and order -------------------------------------------------------------------------------------------- */

static void check_random_reads(context * c) {
    for (uint32_t i = 0; i < DEPTH; ++i) {
        start_any(c, i);
    }
    for (uint32_t n = 0; n < 500; ++n) {
        const uint32_t i = rnd_below(DEPTH);
        if (n % 3 == 0) {
            llmaas_io_poll(c->io);
        } else {
            llmaas_io_wait(c->io, &c->reads[i]);
            CHECK(c->reads[i].is_done);
        }
        if (c->reads[i].is_done) {
            check_got(&c->reads[i]);
            start_any(c, i);
        }
    }
    check_drained(c, DEPTH);
}

static void check_order(context * c) {
    for (uint32_t round = 0; round < 50; ++round) {
        for (uint32_t i = 0; i < DEPTH; ++i) {
            start(c, i, (uint64_t) i * BLOCK, i % 8 == 7 ? BLOCK : SLOT);
        }
        const llmaas_io_read * chosen = &c->reads[round % DEPTH];
        llmaas_io_wait(c->io, chosen);
        check_got(chosen);
        llmaas_io_wait(c->io, chosen); /* returns at once, as it is done */
        check_drained(c, DEPTH);
    }
}

static void check_polling(context * c) {
    start(c, 0, 0, SLOT);
    start(c, 1, SLOT, SLOT);
    while (llmaas_io_room(c->io) < DEPTH) {
        llmaas_io_poll(c->io);
    }
    check_got(&c->reads[0]);
    check_got(&c->reads[1]);
}

static void check_room(context * c) {
    for (uint32_t i = 0; i < DEPTH; ++i) {
        CHECK(llmaas_io_room(c->io) == DEPTH - i);
        start_any(c, i);
    }
    llmaas_io_read more = c->reads[0];
    CHECK(llmaas_io_room(c->io) == 0 && llmaas_io_start(c->io, &more) == LLMAAS_EINVAL);
    CHECK(llmaas_io_register(c->io, c->memory, SLOT) == LLMAAS_EINVAL);
    check_drained(c, DEPTH);
}

/* -- reads ahead --------------------------------------------------------------------------------------------------- */

/* Start as many reads ahead as possible. */
static uint32_t start_ahead(context * c) {
    uint32_t n = 0;
    for (c->is_ahead = true; llmaas_io_room_ahead(c->io) > 0; ++n) {
        start_any(c, n);
    }
    c->is_ahead = false;
    return n;
}

static uint32_t n_done(const context * c, uint32_t n) {
    uint32_t n_done = 0;
    for (uint32_t i = 0; i < n; ++i) {
        n_done += c->reads[i].is_done;
    }
    return n_done;
}

static void check_room_ahead(context * c) {
    const uint32_t most = start_ahead(c);
    CHECK(most == (c->kind == LLMAAS_IO_URING ? DEPTH : 16) * 3 / 4 && llmaas_io_room(c->io) == DEPTH - most);
    llmaas_io_read more = c->reads[0];
    CHECK(llmaas_io_start(c->io, &more) == LLMAAS_EINVAL);
    llmaas_io_wait(c->io, start_any(c, most));
    check_got(&c->reads[most]);
    check_drained(c, most + 1);
    CHECK(llmaas_io_room_ahead(c->io) == most);
}

/* Check reads ahead: while others wait, they complete one by one; when nobody waits, all at once. */
static void check_ahead_gives_way(context * c) {
    enum { N_POLLS = 5 };
    llmaas_io_begin_waiting();
    const uint32_t n = start_ahead(c);
    for (uint32_t i = 1; i <= N_POLLS; ++i) {
        llmaas_io_poll(c->io);
        CHECK(n_done(c, n) <= i);
    }
    while (n_done(c, n) < N_POLLS) {
        llmaas_io_poll(c->io);
    }
    llmaas_io_end_waiting();
    while (n_done(c, n) < n) {
        llmaas_io_poll(c->io);
    }
    check_drained(c, n);
}

/* Check that a read ahead that is waited for overtakes others. That may take a while: threads may sleep. */
static void check_ahead_is_waited_for(context * c) {
    llmaas_io_begin_waiting();
    for (bool has_overtaken = false; !has_overtaken;) {
        const uint32_t n = start_ahead(c);
        llmaas_io_wait(c->io, &c->reads[n - 1]);
        check_got(&c->reads[n - 1]);
        has_overtaken = n_done(c, n) < n;
        check_drained(c, n);
    }
    llmaas_io_end_waiting();
}

static void check_close_in_flight(context * c) {
    llmaas_io * const kept = c->io;
    c->io = opened(c->kind, DEPTH);
    for (uint32_t i = 0; i < DEPTH; ++i) {
        start_any(c, i);
        if (i == DEPTH / 2) {
            llmaas_io_poll(c->io);
        }
    }
    llmaas_io_close(c->io);
    for (uint32_t i = 0; i < DEPTH; ++i) {
        check_got(&c->reads[i]);
    }
    c->io = kept;
}

/* -- ends of files and errors -------------------------------------------------------------------------------------- */

static int32_t error_of(context * c, llmaas_io_read read) {
    read.buffer = c->memory;
    CHECK(llmaas_io_start(c->io, &read) == LLMAAS_OK);
    llmaas_io_wait(c->io, &read);
    CHECK(read.is_done && llmaas_io_room(c->io) == DEPTH);
    return read.error;
}

static void check_ends(context * c) {
    const uint64_t last = N_BLOCKS * BLOCK;
    start(c, 0, last, BLOCK); /* short, which is fine */
    start(c, 1, last - BLOCK, SLOT);
    start(c, 2, last, SLOT);
    check_drained(c, 3);
    const uint64_t past = last + BLOCK;
    CHECK(error_of(c, (llmaas_io_read) {.fd = c->fd, .offset = last, .n_bytes = BLOCK, .n_needed = TAIL + 1}) == ENODATA);
    CHECK(error_of(c, (llmaas_io_read) {.fd = c->fd, .offset = last - BLOCK, .n_bytes = SLOT, .n_needed = SLOT}) == ENODATA);
    CHECK(error_of(c, (llmaas_io_read) {.fd = c->fd, .offset = past, .n_bytes = BLOCK, .n_needed = 1}) == ENODATA);
    CHECK(error_of(c, (llmaas_io_read) {.fd = c->fd, .offset = past, .n_bytes = BLOCK, .n_needed = 0}) == 0);
}

static void check_errors(context * c) {
    const int closed = dup(c->fd), folder = open("/", O_RDONLY);
    close(closed);
    CHECK(error_of(c, (llmaas_io_read) {.fd = closed, .n_bytes = BLOCK, .n_needed = BLOCK}) == EBADF);
    CHECK(error_of(c, (llmaas_io_read) {.fd = -1, .n_bytes = BLOCK, .n_needed = BLOCK}) == EBADF);
    CHECK(error_of(c, (llmaas_io_read) {.fd = folder, .n_bytes = BLOCK, .n_needed = BLOCK}) == EISDIR);
    close(folder);
    start(c, 0, 0, BLOCK); /* later reads work */
    check_drained(c, 1);
}

static void check_refusals(context * c) {
    const llmaas_io_read good = {.fd = c->fd, .n_bytes = BLOCK, .n_needed = BLOCK, .buffer = c->memory};
    llmaas_io_read empty = good, more = good, nowhere = good, far = good;
    empty.n_bytes = empty.n_needed = 0;
    more.n_needed++;
    nowhere.buffer = NULL;
    far.offset     = INT64_MAX - BLOCK;
    llmaas_io_read * const bad[] = {&empty, &more, &nowhere, &far};
    for (int i = 0; i < 4; ++i) {
        CHECK(llmaas_io_start(c->io, bad[i]) == LLMAAS_EINVAL);
        llmaas_io_wait(c->io, bad[i]);
        CHECK(bad[i]->is_done && bad[i]->error == EINVAL); /* nobody takes its buffer for what was read */
    }
    CHECK(llmaas_io_room(c->io) == DEPTH);
    llmaas_io * io = NULL;
    CHECK(llmaas_io_open(c->kind, 0, &io) == LLMAAS_EINVAL);
    CHECK(llmaas_io_open(c->kind, LLMAAS_IO_MAX_DEPTH + 1, &io) == LLMAAS_EINVAL);
    CHECK(llmaas_io_open((llmaas_io_kind) 3, 1, &io) == LLMAAS_EINVAL && io == NULL);
    CHECK(llmaas_io_register(c->io, NULL, BLOCK) == LLMAAS_EINVAL);
    llmaas_io_close(NULL);
}

/* Check partial results of system calls: a file system may stop anywhere. */
static void check_pieces(void) {
    llmaas_io_read read = {.n_bytes = 3 * BLOCK, .n_needed = 2 * BLOCK + 5};
    CHECK(!llmaas_io_take(&read, -EINTR) && !llmaas_io_take(&read, -EAGAIN) && llmaas_io_resume_at(&read) == 0);
    CHECK(!llmaas_io_take(&read, BLOCK + 100) && llmaas_io_resume_at(&read) == BLOCK);
    CHECK(!llmaas_io_take(&read, 101) && llmaas_io_resume_at(&read) == BLOCK);
    llmaas_io_read end = read, broken = read;
    CHECK(llmaas_io_take(&read, BLOCK + 5) && read.error == 0);
    CHECK(llmaas_io_take(&end, 101) && end.error == ENODATA);
    CHECK(llmaas_io_take(&broken, -EIO) && broken.error == EIO);
    uint8_t        places[3 * BLOCK];
    struct iovec   iov[] = {{places + 2 * BLOCK, BLOCK}, {places, 2 * BLOCK}};
    llmaas_io_read parts = {.n_bytes = 3 * BLOCK, .n_needed = 3 * BLOCK, .vector = iov, .n_pieces = 2};
    CHECK(!llmaas_io_take(&parts, 100) && parts.n_pieces == 2 && parts.vector->iov_len == BLOCK);
    CHECK(!llmaas_io_take(&parts, 2 * BLOCK + 100) && parts.n_pieces == 1);
    CHECK(parts.vector->iov_base == places + BLOCK && parts.vector->iov_len == BLOCK);
    CHECK(llmaas_io_take(&parts, BLOCK) && parts.error == 0);
}

/* Check three pieces in file order, each to another place, and a file that ends in the last. */
static void check_vectors(context * c) {
    struct iovec iov[DEPTH][3];
    for (uint32_t i = 0; i < DEPTH; ++i) {
        uint8_t *      to   = c->memory + (size_t) i * SLOT;
        const uint64_t from = (i % 2 ? N_BLOCKS - 5 : rnd_below(N_BLOCKS - 6)) * (uint64_t) BLOCK;
        iov[i][0] = (struct iovec) {to + 8 * BLOCK, 2 * BLOCK};
        iov[i][1] = (struct iovec) {to, BLOCK};
        iov[i][2] = (struct iovec) {to + 4 * BLOCK, 3 * BLOCK};
        memset(to, 0xa5, SLOT);
        c->reads[i] = (llmaas_io_read) {
            .fd = c->fd, .offset = from, .n_bytes = 6 * BLOCK, .n_needed = i % 2 ? 5 * BLOCK + TAIL : 6 * BLOCK,
            .vector = iov[i], .n_pieces = 3};
        CHECK(llmaas_io_start(c->io, &c->reads[i]) == LLMAAS_OK);
    }
    llmaas_io_drain(c->io);
    for (uint32_t i = 0; i < DEPTH; ++i) {
        const llmaas_io_read * read = &c->reads[i];
        const uint8_t *        to   = c->memory + (size_t) i * SLOT;
        const uint32_t         left = read->n_needed - 3 * BLOCK;
        CHECK(read->is_done && read->error == 0 && read->n_read == read->n_needed);
        CHECK(memcmp(to + 8 * BLOCK, content + read->offset, 2 * BLOCK) == 0);
        CHECK(memcmp(to, content + read->offset + 2 * BLOCK, BLOCK) == 0);
        CHECK(memcmp(to + 4 * BLOCK, content + read->offset + 3 * BLOCK, left) == 0);
        CHECK(to[BLOCK] == 0xa5 && to[7 * BLOCK] == 0xa5 && to[10 * BLOCK] == 0xa5);
    }
}

/* -- registered memory --------------------------------------------------------------------------------------------- */

static void check_registered(context * c) {
    CHECK(llmaas_io_register(c->io, c->memory, DEPTH * SLOT) == LLMAAS_OK);
    check_random_reads(c);
    check_ends(c);
    CHECK(llmaas_io_register(c->io, c->memory + SLOT / 2, DEPTH * SLOT / 2) == LLMAAS_OK); /* reads inside, across and
                                                                                            * outside of it */
    check_random_reads(c);
    uint8_t * locked = mmap(NULL, 2 * SLOT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(locked != MAP_FAILED && mprotect(locked + SLOT, SLOT, PROT_NONE) == 0);
    CHECK(llmaas_io_register(c->io, locked, 2 * SLOT) == LLMAAS_OK); /* refused: half of it is not writable */
    uint8_t * const kept = c->memory;
    c->memory = locked;
    start(c, 0, 0, SLOT);
    check_drained(c, 1);
    c->memory = kept;
    check_random_reads(c);
    CHECK(llmaas_io_register(c->io, NULL, 0) == LLMAAS_OK);
    munmap(locked, 2 * SLOT);
    check_random_reads(c);
}

/* Check more memory than the kernel takes as one buffer: the same pages mapped repeatedly. */
static void check_large_region(context * c) {
    enum { PIECE = 16 << 20, N_PIECES = 65 };
    const int pages = memfd_create("pages", MFD_CLOEXEC);
    uint8_t * large = mmap(NULL, (size_t) PIECE * N_PIECES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(pages >= 0 && ftruncate(pages, PIECE) == 0 && large != MAP_FAILED);
    for (size_t i = 0; i < N_PIECES; ++i) {
        uint8_t * at = large + i * PIECE;
        CHECK(mmap(at, PIECE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, pages, 0) == at);
    }
    CHECK(llmaas_io_register(c->io, large, (size_t) PIECE * N_PIECES) == LLMAAS_OK);
    uint8_t * const kept = c->memory;
    const size_t    bound = (size_t) 1 << 30;
    const size_t    places[] = {0, bound - SLOT, bound - SLOT / 2, bound, bound + PIECE - SLOT};
    for (int i = 0; i < 5; ++i) { /* one read crosses the boundary */
        c->memory = large + places[i];
        start(c, 0, (uint64_t) i * SLOT, SLOT);
        check_drained(c, 1);
    }
    c->memory = kept;
    CHECK(llmaas_io_register(c->io, NULL, 0) == LLMAAS_OK);
    munmap(large, (size_t) PIECE * N_PIECES);
    close(pages);
}

/* -- threads ------------------------------------------------------------------------------------------------------- */

static void * start_and_leave(void * context_) {
    context * c = context_;
    for (uint32_t i = 0; i < DEPTH / 2; ++i) {
        start_any(c, i);
    }
    llmaas_io_poll(c->io);
    for (uint32_t i = DEPTH / 2; i < DEPTH; ++i) {
        start_any(c, i);
    }
    return NULL;
}

/* Check that reads outlive the thread that started them. */
static void check_threads_that_end(context * c) {
    for (int round = 0; round < 20; ++round) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, start_and_leave, c) == 0 && pthread_join(thread, NULL) == 0);
        check_drained(c, DEPTH);
    }
}

typedef struct turns {
    context *         c;
    pthread_mutex_t * lock;
    uint32_t          first; /* of this thread's half of the slots */
} turns;

static void * take_turns(void * turns_) {
    const turns * t = turns_;
    for (uint32_t n = 0; n < 500; ++n) {
        pthread_mutex_lock(t->lock);
        start_any(t->c, t->first + n % (DEPTH / 2));
        llmaas_io_poll(t->c->io);
        pthread_mutex_unlock(t->lock);
        pthread_mutex_lock(t->lock);
        llmaas_io_wait(t->c->io, &t->c->reads[t->first + n % (DEPTH / 2)]);
        check_got(&t->c->reads[t->first + n % (DEPTH / 2)]);
        pthread_mutex_unlock(t->lock);
    }
    return NULL;
}

static void check_two_threads(context * c) {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    turns     one = {c, &lock, 0}, other = {c, &lock, DEPTH / 2};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, take_turns, &other) == 0);
    take_turns(&one);
    CHECK(pthread_join(thread, NULL) == 0);
    check_drained(c, DEPTH);
}

/* -- forks --------------------------------------------------------------------------------------------------------- */

static void * wait_for_ever(void * waits) {
    llmaas_io_begin_waiting();
    sem_post(waits);
    pause();
    return NULL;
}

static void check_child(context * c, uint32_t n) {
    CHECK(atomic_load(&llmaas_io_n_waiting) == 0); /* the thread that waits is the parent's */
    check_drained(c, n);
    check_random_reads(c);
    llmaas_io_close(c->io);
}

/* Check that both processes complete all reads that were in flight, reads ahead included, each into its own memory, and
 * can start more. */
static void check_fork(context * c) {
    const bool had_region = c->is_direct && llmaas_io_register(c->io, c->memory, DEPTH * SLOT) == LLMAAS_OK;
    for (int round = 0; round < 8; ++round) {
        const uint32_t n_ahead = start_ahead(c);
        uint32_t       n       = n_ahead;
        while (llmaas_io_room(c->io) > 0) {
            start_any(c, n++);
        }
        if (round % 2 == 1) {
            llmaas_io_poll(c->io);
        }
        const pid_t child = fork();
        if (child == 0) {
            alarm(60);
            check_child(c, n);
            _exit(0);
        }
        check_drained(c, n);
        check_random_reads(c);
        int status = -1;
        CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    }
    CHECK(!had_region || llmaas_io_register(c->io, NULL, 0) == LLMAAS_OK);
}

/* Check that reads into vectors fail in a child. */
static void check_vector_in_child(context * c) {
    struct iovec   piece = {c->memory, BLOCK};
    llmaas_io_read read  = {.fd = c->fd, .n_bytes = BLOCK, .n_needed = BLOCK, .vector = &piece, .n_pieces = 1};
    CHECK(llmaas_io_start(c->io, &read) == LLMAAS_OK);
    const pid_t child = fork();
    if (child == 0) {
        llmaas_io_wait(c->io, &read);
        _exit(read.is_done && read.error == ECANCELED && llmaas_io_room(c->io) == DEPTH ? 0 : 1);
    }
    llmaas_io_drain(c->io);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0 && read.error == 0);
}

/* Check that a thread that waits in the parent does not delay a child's reads ahead. */
static void check_waiting_in_child(context * c) {
    sem_t     waits;
    pthread_t thread;
    CHECK(sem_init(&waits, 0, 0) == 0 && pthread_create(&thread, NULL, wait_for_ever, &waits) == 0);
    CHECK(sem_wait(&waits) == 0 && atomic_load(&llmaas_io_n_waiting) == 1);
    const pid_t child = fork();
    if (child == 0) {
        const uint32_t n = start_ahead(c);
        check_child(c, n);
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, NULL) == 0);
    llmaas_io_end_waiting();
    sem_destroy(&waits);
}

/* -- kinds --------------------------------------------------------------------------------------------------------- */

/* Check a ring that the kernel no longer serves; here its descriptor is another file by then. */
static void check_forbidden_later(context * c) {
    llmaas_io * const kept = c->io;
    const int ring = dup(c->fd), null = open("/dev/null", O_RDWR | O_CLOEXEC);
    close(ring); /* the next file opened gets this descriptor */
    c->io = opened(LLMAAS_IO_URING, DEPTH);
    CHECK(null >= 0 && dup2(null, ring) == ring);
    for (uint32_t i = 0; i < DEPTH; ++i) {
        start_any(c, i);
    }
    check_drained(c, DEPTH);
    llmaas_io_close(c->io);
    close(null);
    c->io = kept;
}

static void check_depth_one(context * c) {
    llmaas_io * const kept = c->io;
    c->io = opened(c->kind, 1);
    for (int i = 0; i < 20; ++i) {
        const llmaas_io_read * read = start_any(c, 0);
        CHECK(llmaas_io_room(c->io) == 0);
        llmaas_io_wait(c->io, read);
        check_got(read);
    }
    llmaas_io_close(c->io);
    c->io = kept;
}

static void check_kind(llmaas_io_kind kind, int fd, bool is_direct) {
    context c = {.kind = kind, .fd = fd, .is_direct = is_direct, .io = opened(kind, DEPTH)};
    c.memory = aligned_alloc(BLOCK, DEPTH * SLOT);
    CHECK(c.memory != NULL);
    void (* const checks[])(context *) = {
        check_random_reads, check_order,            check_polling,     check_room,      check_close_in_flight,
        check_ends,         check_errors,           check_refusals,    check_depth_one, check_registered,
        check_large_region, check_threads_that_end, check_two_threads,
        check_room_ahead,   check_ahead_gives_way,  check_ahead_is_waited_for,
        check_vectors,          check_fork,             check_vector_in_child, check_waiting_in_child,
    };
    for (size_t i = 0; i < sizeof checks / sizeof *checks; ++i) {
        checks[i](&c);
    }
    if (kind == LLMAAS_IO_URING) {
        check_forbidden_later(&c);
    }
    llmaas_io_close(c.io);
    free(c.memory);
}

static void check_all(int fd, bool is_direct, bool has_uring) {
    check_kind(LLMAAS_IO_THREADS, fd, is_direct);
    if (has_uring) {
        check_kind(LLMAAS_IO_URING, fd, is_direct);
    }
}

static bool check_best(void) {
    llmaas_io * io = NULL;
    const llmaas_status status = llmaas_io_open(LLMAAS_IO_URING, DEPTH, &io);
    CHECK(status == LLMAAS_OK || status == LLMAAS_EUNSUPPORTED);
    llmaas_io_close(io);
    CHECK(llmaas_io_open(LLMAAS_IO_BEST, DEPTH, &io) == LLMAAS_OK);
    CHECK(llmaas_io_kind_of(io) == (status == LLMAAS_OK ? LLMAAS_IO_URING : LLMAAS_IO_THREADS));
    llmaas_io_close(io);
    return status == LLMAAS_OK;
}

int main(void) {
    char path[] = "/tmp/llmaas-io-XXXXXX";
    make_file(path);
    check_pieces();
    const bool has_uring = check_best();
    const int  fd = open(path, O_RDONLY | O_CLOEXEC), direct = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    CHECK(fd >= 0 && unlink(path) == 0);
    check_all(fd, false, has_uring);
    if (direct >= 0) {
        check_all(direct, true, has_uring);
        close(direct);
    }
    printf("%s%s", has_uring ? "" : "skipped: no io_uring here\n", direct >= 0 ? "" : "skipped: no O_DIRECT here\n");
    close(fd);
    free(content);
    return 0;
}
