#include "io_backend.h"
#include "iov.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BLOCK = 4096 };

struct llmaas_io {
    const llmaas_io_backend * backend;
    void *                    state;
    uint32_t                  depth;
    uint32_t                  n_at_once;
    uint32_t                  n_in_flight;
    uint32_t                  n_ahead; /* reads ahead among n_in_flight */
    uint32_t                  n_held;  /* reads among n_ahead that were not passed to the backend yet */
    llmaas_io_read *          held;    /* list of those reads, the next one to go first */
    bool                      is_waited_for;
    uint32_t                  n_forks;      /* fork count when the backend was opened */
    void *                    region;       /* registered memory */
    size_t                    region_bytes;
    uint32_t                  n_passed;
    llmaas_io_read *          passed[LLMAAS_IO_MAX_DEPTH]; /* reads that the backend has, in any order */
};

/* Threads of the process that wait for reads, in whichever library: a GNU unique symbol is one variable for all of
 * them. */
__attribute__((visibility("default"))) atomic_uint llmaas_io_n_waiting;
#ifdef __linux__
__asm__(".type llmaas_io_n_waiting, %gnu_unique_object");
#endif

/* -- forks --------------------------------------------------------------------------------------------------------- */

static atomic_uint n_forks; /* forks between the process that loaded this library and this one */

/* Reset the count of waiting threads in a child: threads of the parent do not exist here. */
static void note_child(void) {
    atomic_fetch_add(&n_forks, 1);
    atomic_store(&llmaas_io_n_waiting, 0);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, note_child); }

static void expect_forks(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
}

/* -- helpers for backends ------------------------------------------------------------------------------------------ */

uint32_t llmaas_io_resume_at(const llmaas_io_read * read) { return read->n_read / BLOCK * BLOCK; }

/* Return whether to retry. ECANCELED: the thread that submitted the read to io_uring has ended. */
static bool is_passing(int64_t result) { return result == -EINTR || result == -EAGAIN || result == -ECANCELED; }

bool llmaas_io_take(llmaas_io_read * read, int64_t result) {
    if (is_passing(result)) {
        return false;
    }
    if (result < 0) {
        read->error = (int32_t) -result;
        return true;
    }
    const uint32_t from     = llmaas_io_resume_at(read), end = from + (uint32_t) result;
    const bool     got_more = end > read->n_read;
    read->n_read   = got_more ? end : read->n_read;
    read->n_pieces = read->vector ? llmaas_iov_skip(&read->vector, read->n_pieces, llmaas_io_resume_at(read) - from) : 0;
    read->error  = read->n_read < read->n_needed && !got_more ? ENODATA : 0;
    return read->n_read >= read->n_needed || !got_more;
}

void llmaas_io_read_now(llmaas_io_read * read) {
    ssize_t n;
    do {
        const uint32_t at = llmaas_io_resume_at(read);
        const off_t    offset = (off_t) (read->offset + at);
        n = read->vector ? preadv(read->fd, read->vector, (int) read->n_pieces, offset)
                         : pread(read->fd, (uint8_t *) read->buffer + at, read->n_bytes - at, offset);
    } while (!llmaas_io_take(read, n < 0 ? -errno : n));
}

/* -- the engine ---------------------------------------------------------------------------------------------------- */

static llmaas_status open_backend(llmaas_io * io, llmaas_io_kind kind) {
    const llmaas_io_backend * backend = kind == LLMAAS_IO_THREADS ? &llmaas_io_threads : &llmaas_io_uring;
    void *                    state   = NULL;
    llmaas_status             status  = backend->open(io->depth, &state);
    if (status != LLMAAS_OK && kind == LLMAAS_IO_BEST) {
        backend = &llmaas_io_threads;
        status  = backend->open(io->depth, &state);
    }
    if (status == LLMAAS_OK) {
        io->backend   = backend;
        io->state     = state;
        io->n_at_once = io->depth < backend->n_at_once ? io->depth : backend->n_at_once;
        io->n_forks   = atomic_load(&n_forks);
    }
    return status;
}

static void start_backend(llmaas_io * io, llmaas_io_read * read) {
    io->passed[io->n_passed++] = read;
    io->backend->start(io->state, read);
}

static void forget_passed(llmaas_io * io, const llmaas_io_read * read) {
    uint32_t i = 0;
    while (io->passed[i] != read) {
        i++;
    }
    io->passed[i] = io->passed[--io->n_passed];
}

static void finish(llmaas_io * io, llmaas_io_read * read) {
    read->is_done = true;
    io->n_ahead -= read->is_ahead ? 1 : 0;
    io->n_in_flight--;
}

static bool is_inherited(const llmaas_io * io) { return io->n_forks != atomic_load(&n_forks); }

/* Restart the reads that the parent's backend had. A vector cannot be restarted: it may be partly consumed. */
static void restart_passed(llmaas_io * io) {
    const uint32_t n = io->n_passed;
    llmaas_io_read * reads[LLMAAS_IO_MAX_DEPTH];
    memcpy(reads, io->passed, n * sizeof *reads);
    io->n_passed = 0;
    for (uint32_t i = 0; i < n; ++i) {
        reads[i]->n_read = 0;
        reads[i]->error  = reads[i]->vector ? ECANCELED : 0;
        if (reads[i]->vector) {
            finish(io, reads[i]);
        } else {
            start_backend(io, reads[i]);
        }
    }
}

/* Give a forked child a backend of its own. The parent's rings and threads stay with the parent, which gets their
 * results; open new ones here and restart the same reads. False if out of memory; the caller then fails all reads. */
static bool own_backend(llmaas_io * io) {
    if (!is_inherited(io)) {
        return true;
    }
    const llmaas_io_backend * parents = io->backend;
    void *                    state   = io->state;
    if (open_backend(io, parents->kind == LLMAAS_IO_THREADS ? LLMAAS_IO_THREADS : LLMAAS_IO_BEST) != LLMAAS_OK) {
        return false;
    }
    parents->abandon(state);
    io->is_waited_for = false;
    io->backend->use_region(io->state, io->region, io->region_bytes);
    restart_passed(io);
    return true;
}

static void fail_all(llmaas_io * io) {
    for (; io->n_passed > 0; io->n_passed--) {
        io->passed[io->n_passed - 1]->error = ENOMEM;
        finish(io, io->passed[io->n_passed - 1]);
    }
    for (; io->held; io->held = io->held->next) {
        io->held->error = ENOMEM;
        finish(io, io->held);
    }
    io->n_held = 0;
}

llmaas_status llmaas_io_open(llmaas_io_kind kind, uint32_t depth, llmaas_io ** io) {
    if (!io || depth == 0 || depth > LLMAAS_IO_MAX_DEPTH || (unsigned) kind > LLMAAS_IO_THREADS) {
        return LLMAAS_EINVAL;
    }
    expect_forks();
    llmaas_io * made = calloc(1, sizeof *made);
    if (!made) {
        return LLMAAS_ESPACE;
    }
    made->depth                = depth;
    const llmaas_status status = open_backend(made, kind);
    if (status != LLMAAS_OK) {
        free(made);
        return status;
    }
    *io = made;
    return LLMAAS_OK;
}

void llmaas_io_close(llmaas_io * io) {
    if (io && !is_inherited(io)) {
        llmaas_io_drain(io);
        io->backend->close(io->state);
    } else if (io) {
        io->backend->abandon(io->state);
    }
    free(io);
}

llmaas_io_kind llmaas_io_kind_of(const llmaas_io * io) { return io->backend->kind; }

static size_t in_huge_pages(size_t n_bytes) {
    return (n_bytes + LLMAAS_IO_HUGE_PAGE - 1) / LLMAAS_IO_HUGE_PAGE * LLMAAS_IO_HUGE_PAGE;
}

/* Map fresh memory instead of using the allocator, whose memory may already consist of small pages. */
void * llmaas_io_memory(size_t n_bytes) {
    const size_t n = in_huge_pages(n_bytes), n_more = n + LLMAAS_IO_HUGE_PAGE;
    char *       base = mmap(NULL, n_more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        return NULL;
    }
    char * memory = base + (LLMAAS_IO_HUGE_PAGE - (uintptr_t) base % LLMAAS_IO_HUGE_PAGE) % LLMAAS_IO_HUGE_PAGE;
    if (memory > base) {
        munmap(base, (size_t) (memory - base));
    }
    munmap(memory + n, (size_t) (base + n_more - (memory + n)));
#ifdef MADV_HUGEPAGE
    madvise(memory, n, MADV_HUGEPAGE);
#endif
    return memory;
}

void llmaas_io_memory_free(void * memory, size_t n_bytes) {
    if (memory) {
        munmap(memory, in_huge_pages(n_bytes));
    }
}

llmaas_status llmaas_io_register(llmaas_io * io, void * memory, size_t n_bytes) {
    if (io->n_in_flight > 0 || (!memory && n_bytes > 0)) {
        return LLMAAS_EINVAL;
    }
    io->region       = memory;
    io->region_bytes = n_bytes;
    if (!is_inherited(io)) { /* else it is registered with the child's own backend */
        io->backend->use_region(io->state, memory, n_bytes);
    }
    return LLMAAS_OK;
}

/* -- reads --------------------------------------------------------------------------------------------------------- */

uint32_t llmaas_io_room(const llmaas_io * io) { return io->depth - io->n_in_flight; }

uint32_t llmaas_io_room_ahead(const llmaas_io * io) {
    const uint32_t most = io->n_at_once > 1 ? io->n_at_once - (io->n_at_once + 3) / 4 : 1, room = llmaas_io_room(io);
    return most - io->n_ahead < room ? most - io->n_ahead : room;
}

static void hold(llmaas_io * io, llmaas_io_read * read) {
    llmaas_io_read ** end = &io->held;
    while (*end) {
        end = &(*end)->next;
    }
    *end = read;
    io->n_held++;
}

static void pass(llmaas_io * io, llmaas_io_read ** held) {
    llmaas_io_read * read = *held;
    *held                 = read->next;
    io->n_held--;
    start_backend(io, read);
}

static bool others_wait(const llmaas_io * io) { return atomic_load(&llmaas_io_n_waiting) > (io->is_waited_for ? 1u : 0u); }

/* Pass reads ahead that are held back. One of them may always be in flight, since others may wait all the time. */
static void pass_held(llmaas_io * io) {
    while (io->held && io->n_in_flight - io->n_held < io->n_at_once && (io->n_ahead == io->n_held || !others_wait(io))) {
        pass(io, &io->held);
    }
}

/* Return a status for a read that was not started. The read is done and has failed, for callers that only wait. */
static llmaas_status not_started(llmaas_io_read * read, int32_t error, llmaas_status status) {
    read->error   = error;
    read->is_done = true;
    return status;
}

llmaas_status llmaas_io_start(llmaas_io * io, llmaas_io_read * read) {
    const uint32_t room = read->is_ahead ? llmaas_io_room_ahead(io) : llmaas_io_room(io);
    if (room == 0 || !(read->buffer || read->vector) || read->n_bytes == 0 || read->n_needed > read->n_bytes ||
        read->offset > INT64_MAX - UINT32_MAX) {
        return not_started(read, EINVAL, LLMAAS_EINVAL);
    }
    if (!own_backend(io)) {
        fail_all(io);
        return not_started(read, ENOMEM, LLMAAS_ESPACE);
    }
    read->error   = 0;
    read->is_done = false;
    read->n_read  = 0;
    read->next    = NULL;
    io->n_in_flight++;
    if (read->is_ahead) {
        io->n_ahead++;
        hold(io, read);
    } else {
        start_backend(io, read);
    }
    return LLMAAS_OK;
}

static void collect(llmaas_io * io, bool is_patient) {
    if (!own_backend(io)) {
        fail_all(io);
        return;
    }
    pass_held(io);
    if (io->n_in_flight == 0) { /* no read of the parent's could be restarted */
        return;
    }
    llmaas_io_read * next;
    for (llmaas_io_read * read = io->backend->collect(io->state, is_patient); read; read = next) {
        next = read->next;
        forget_passed(io, read);
        finish(io, read);
    }
}

void llmaas_io_begin_waiting(void) {
    expect_forks();
    atomic_fetch_add(&llmaas_io_n_waiting, 1);
}

void llmaas_io_end_waiting(void) { atomic_fetch_sub(&llmaas_io_n_waiting, 1); }

void llmaas_io_poll(llmaas_io * io) {
    if (io->n_in_flight > 0) {
        collect(io, false);
    }
}

/* Wait until a read is done; NULL: until all are. */
static void wait_for(llmaas_io * io, const llmaas_io_read * read) {
    io->is_waited_for = true;
    llmaas_io_begin_waiting();
    while (io->n_in_flight > 0 && !(read && read->is_done)) {
        collect(io, true);
    }
    llmaas_io_end_waiting();
    io->is_waited_for = false;
}

void llmaas_io_wait(llmaas_io * io, const llmaas_io_read * read) {
    llmaas_io_read ** at = &io->held;
    while (*at && *at != read) {
        at = &(*at)->next;
    }
    if (*at && own_backend(io)) {
        pass(io, at);
    }
    wait_for(io, read);
}

void llmaas_io_drain(llmaas_io * io) {
    while (io->held && own_backend(io)) {
        pass(io, &io->held);
    }
    wait_for(io, NULL);
}
