#include "io_backend.h"

#ifdef __linux__
#include <sys/syscall.h>
#if defined(__has_include) && defined(__NR_io_uring_setup)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif
#endif

#ifdef IORING_FEAT_RW_CUR_POS /* appeared together with IORING_OP_READ (Linux 5.6), which is not a macro */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define REGION_BYTES (1ull << 30) /* largest buffer that can be registered */

/* The kernel moves sq_head and cq_tail; we move sq_tail and cq_head. */
typedef struct uring {
    int       fd;
    uint32_t *sq_head, *sq_tail, *cq_head, *cq_tail;
    uint32_t  sq_mask, cq_mask;
    struct io_uring_sqe *       sqes;
    const struct io_uring_cqe * cqes;
    void *    rings;
    size_t    rings_bytes, sqes_bytes;
    uintptr_t region; /* registered memory, in buffers of REGION_BYTES */
    size_t    region_bytes;
} uring;

/* -- opening and closing ------------------------------------------------------------------------------------------- */

static void * map(int fd, size_t n_bytes, uint64_t what) {
    void * memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, (off_t) what);
    return memory == MAP_FAILED ? NULL : memory;
}

static void uring_free(uring * u) {
    if (u->sqes) {
        munmap(u->sqes, u->sqes_bytes);
    }
    if (u->rings) {
        munmap(u->rings, u->rings_bytes);
    }
    if (u->fd >= 0) {
        close(u->fd);
    }
    free(u);
}

static bool map_rings(uring * u, const struct io_uring_params * p) {
    const size_t sq_bytes = p->sq_off.array + p->sq_entries * sizeof(uint32_t);
    const size_t cq_bytes = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    u->rings_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    u->sqes_bytes  = p->sq_entries * sizeof(struct io_uring_sqe);
    u->rings = map(u->fd, u->rings_bytes, IORING_OFF_SQ_RING);
    u->sqes  = map(u->fd, u->sqes_bytes, IORING_OFF_SQES);
    return u->rings && u->sqes;
}

static void find_fields(uring * u, const struct io_uring_params * p) {
    uint8_t * at = u->rings;
    u->sq_head = (uint32_t *) (void *) (at + p->sq_off.head);
    u->sq_tail = (uint32_t *) (void *) (at + p->sq_off.tail);
    u->cq_head = (uint32_t *) (void *) (at + p->cq_off.head);
    u->cq_tail = (uint32_t *) (void *) (at + p->cq_off.tail);
    u->cqes    = (const struct io_uring_cqe *) (const void *) (at + p->cq_off.cqes);
    u->sq_mask = p->sq_entries - 1;
    u->cq_mask = p->cq_entries - 1;
    uint32_t * order = (uint32_t *) (void *) (at + p->sq_off.array);
    for (uint32_t i = 0; i < p->sq_entries; ++i) {
        order[i] = i;
    }
}

/* Open without flags. IORING_SETUP_SINGLE_ISSUER forbids changing the using thread. With IORING_SETUP_COOP_TASKRUN, a
 * read that one thread submitted would not complete for another while the first computes. */
static llmaas_status uring_open(uint32_t depth, void ** state) {
    struct io_uring_params p = {0};
    uring * u = calloc(1, sizeof *u);
    if (!u) {
        return LLMAAS_ESPACE;
    }
    u->fd = (int) syscall(__NR_io_uring_setup, depth, &p);
    const bool is_refused = u->fd < 0 && errno != ENOMEM;
    if (is_refused || (u->fd >= 0 && !(p.features & IORING_FEAT_RW_CUR_POS))) {
        uring_free(u);
        return LLMAAS_EUNSUPPORTED;
    }
    if (u->fd < 0 || !map_rings(u, &p)) {
        uring_free(u);
        return LLMAAS_ESPACE;
    }
    find_fields(u, &p);
    *state = u;
    return LLMAAS_OK;
}

/* -- a registered region ------------------------------------------------------------------------------------------- */

static long register_buffers(const uring * u, const struct iovec * iov, uint32_t n) {
    return syscall(__NR_io_uring_register, u->fd, iov ? IORING_REGISTER_BUFFERS : IORING_UNREGISTER_BUFFERS, iov, n);
}

static void uring_use_region(void * state, void * memory, size_t n_bytes) {
    uring *      u = state;
    const size_t n = (n_bytes + REGION_BYTES - 1) / REGION_BYTES;
    if (u->region_bytes > 0) {
        register_buffers(u, NULL, 0);
        u->region_bytes = 0;
    }
    struct iovec * iov = n > 0 && n <= UINT16_MAX ? calloc(n, sizeof *iov) : NULL;
    if (!iov) {
        return;
    }
    for (size_t i = 0; i < n; ++i) {
        const size_t left = n_bytes - i * REGION_BYTES;
        iov[i] = (struct iovec) {(uint8_t *) memory + i * REGION_BYTES, left < REGION_BYTES ? left : REGION_BYTES};
    }
    if (register_buffers(u, iov, (uint32_t) n) == 0) {
        u->region       = (uintptr_t) memory;
        u->region_bytes = n_bytes;
    }
    free(iov);
}

/* Unregister before closing: otherwise the kernel unpins the memory only some time after the ring is closed. */
static void uring_close(void * state) {
    uring_use_region(state, NULL, 0);
    uring_free(state);
}

/* Do not unregister in a child: it shares the rings, so that would unregister the parent's memory. */
static void uring_abandon(void * state) { uring_free(state); }

static bool is_in_one_buffer(const uring * u, uintptr_t at, uint32_t n_bytes) {
    const uintptr_t from = at - u->region; /* huge if it starts before the region */
    return from < u->region_bytes && n_bytes <= u->region_bytes - from &&
           from / REGION_BYTES == (from + n_bytes - 1) / REGION_BYTES;
}

/* -- the rings ----------------------------------------------------------------------------------------------------- */

/* Queue a read. There is always room: reads in flight, queued ones included, never exceed the ring's size. */
static void uring_start(void * state, llmaas_io_read * read) {
    uring *         u        = state;
    const uint32_t  resume   = llmaas_io_resume_at(read), tail = *u->sq_tail;
    const uintptr_t to       = (uintptr_t) read->buffer + resume;
    const bool      is_fixed = !read->vector && is_in_one_buffer(u, to, read->n_bytes - resume);
    u->sqes[tail & u->sq_mask] = (struct io_uring_sqe) {
        .opcode    = read->vector ? IORING_OP_READV : is_fixed ? IORING_OP_READ_FIXED : IORING_OP_READ,
        .buf_index = is_fixed ? (uint16_t) ((to - u->region) / REGION_BYTES) : 0,
        .fd        = read->fd,
        .off       = read->offset + resume,
        .addr      = read->vector ? (uintptr_t) read->vector : to,
        .len       = read->vector ? read->n_pieces : read->n_bytes - resume,
        .user_data = (uintptr_t) read,
    };
    __atomic_store_n(u->sq_tail, tail + 1, __ATOMIC_RELEASE);
}

/* Prepend completed reads to a list. Queue short reads again. */
static llmaas_io_read * reap(uring * u, llmaas_io_read * done) {
    uint32_t       head = *u->cq_head;
    const uint32_t tail = __atomic_load_n(u->cq_tail, __ATOMIC_ACQUIRE);
    for (; head != tail; ++head) {
        const struct io_uring_cqe * cqe  = &u->cqes[head & u->cq_mask];
        llmaas_io_read *            read = (llmaas_io_read *) (uintptr_t) cqe->user_data;
        if (llmaas_io_take(read, cqe->res)) {
            read->next = done;
            done       = read;
        } else {
            uring_start(u, read);
        }
    }
    __atomic_store_n(u->cq_head, head, __ATOMIC_RELEASE);
    return done;
}

static uint32_t n_queued(const uring * u) { return *u->sq_tail - __atomic_load_n(u->sq_head, __ATOMIC_ACQUIRE); }

/* Do queued reads synchronously, for a kernel that has started to forbid io_uring, as when a process confines
 * itself. */
static llmaas_io_read * read_queued(uring * u, llmaas_io_read * done) {
    while (n_queued(u) > 0) {
        const uint32_t   tail = *u->sq_tail - 1;
        llmaas_io_read * read = (llmaas_io_read *) (uintptr_t) u->sqes[tail & u->sq_mask].user_data;
        llmaas_io_read_now(read);
        read->next = done;
        done       = read;
        __atomic_store_n(u->sq_tail, tail, __ATOMIC_RELEASE);
    }
    return done;
}

/* Submit queued reads to the kernel, and wait for a result if patient. Reads done synchronously instead are prepended
 * to the list. */
static llmaas_io_read * submit(uring * u, bool is_patient, llmaas_io_read * done) {
    const long rc = syscall(__NR_io_uring_enter, u->fd, n_queued(u), is_patient ? 1 : 0,
                            is_patient ? IORING_ENTER_GETEVENTS : 0, NULL, 0);
    return rc >= 0 || errno == EINTR || errno == EAGAIN || errno == EBUSY ? done : read_queued(u, done);
}

static llmaas_io_read * uring_collect(void * state, bool is_patient) {
    uring *          u    = state;
    llmaas_io_read * done = reap(u, NULL);
    if (n_queued(u) > 0) {
        done = submit(u, is_patient && !done, done);
        done = reap(u, done);
    }
    while (is_patient && !done) {
        done = submit(u, true, done);
        done = reap(u, done);
    }
    return done;
}

const llmaas_io_backend llmaas_io_uring = {
    .kind       = LLMAAS_IO_URING,
    .n_at_once  = LLMAAS_IO_MAX_DEPTH,
    .open       = uring_open,
    .close      = uring_close,
    .abandon    = uring_abandon,
    .start      = uring_start,
    .collect    = uring_collect,
    .use_region = uring_use_region,
};

#else

static llmaas_status uring_open(uint32_t depth, void ** state) {
    (void) depth, (void) state;
    return LLMAAS_EUNSUPPORTED;
}

const llmaas_io_backend llmaas_io_uring = {.kind = LLMAAS_IO_URING, .open = uring_open};

#endif
