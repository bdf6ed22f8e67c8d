/* Asynchronous file reads, many at a time: through io_uring, or by threads where io_uring is not available.
 *
 * One thread at a time may use an engine; it need not always be the same thread. Reads complete only inside calls of
 * this API, never in the background. A forked child can go on using its copy of an engine: it repeats the reads that
 * were in flight, except that reads into vectors fail with ECANCELED. If another thread was using the engine at the
 * fork, the child can only close it.
 *
 * Reads ahead give way to reads that somebody waits for. They start after all other reads of their engine. While any
 * other thread of the process waits for a read, they go one at a time. */
#ifndef LLMAAS_IO_H
#define LLMAAS_IO_H

#include "llmaas/base.h"

#include <stdbool.h>
#include <sys/uio.h>

#define LLMAAS_IO_MAX_DEPTH 256u

typedef struct llmaas_io llmaas_io;

typedef enum llmaas_io_kind {
    LLMAAS_IO_BEST    = 0, /* io_uring if available, else threads */
    LLMAAS_IO_URING   = 1,
    LLMAAS_IO_THREADS = 2, /* one thread for each read in flight, up to 16 */
} llmaas_io_kind;

/* One read of a file or block device. With O_DIRECT, offset, n_bytes and buffer must be multiples of 4096. The read is
 * done once it has n_needed bytes; bytes after those are read only if the same system call returns them, so that a
 * file's last block may be short. The struct and the buffer must stay in place until the read is done.
 *
 * A contiguous read may be scattered to several places: whole blocks, n_bytes in all, given as a vector. The engine
 * owns the vector until the read is done. */
typedef struct llmaas_io_read {
    int      fd;
    uint64_t offset;
    uint32_t n_bytes;
    uint32_t n_needed; /* at most n_bytes */
    void *   buffer;   /* destination; NULL if there is a vector */
    struct iovec * vector;
    uint32_t n_pieces; /* at most IOV_MAX */
    bool     is_ahead; /* nobody waits for it yet; it stops giving way once somebody does */
    int32_t  error;    /* when done: 0 or an errno; ENODATA: the file ends before n_needed */
    bool     is_done;
    uint32_t n_read;   /* private to the engine, as are the members below */
    struct llmaas_io_read * next;
} llmaas_io_read;

/* Open an engine for up to `depth` reads in flight, 1..LLMAAS_IO_MAX_DEPTH. EINVAL: bad depth or kind. EUNSUPPORTED:
 * io_uring was asked for, and the system lacks or forbids it. ESPACE: out of memory. */
LLMAAS_API llmaas_status  llmaas_io_open(llmaas_io_kind kind, uint32_t depth, llmaas_io ** io);
LLMAAS_API llmaas_io_kind llmaas_io_kind_of(const llmaas_io * io); /* never BEST */

/* Tell which memory most reads go to, which saves io_uring work per read. Replaces earlier memory; n_bytes 0
 * unregisters it. All its pages are then in RAM and stay there, and reads go to those physical pages. So register again
 * before unmapping the memory or giving it back with madvise(). If the kernel refuses (RLIMIT_MEMLOCK, for example) or
 * the engine uses threads, the call returns OK and changes nothing. EINVAL: reads are in flight. */
LLMAAS_API llmaas_status llmaas_io_register(llmaas_io * io, void * memory, size_t n_bytes);

/* Allocate memory to read into. It uses huge pages where the system has them: a read pins its pages one by one, and a
 * read to scattered pages is split on its way to the disk. n_bytes is rounded up to LLMAAS_IO_HUGE_PAGE. NULL if out of
 * memory. */
#define LLMAAS_IO_HUGE_PAGE ((size_t) 2 << 20)
LLMAAS_API void * llmaas_io_memory(size_t n_bytes);
LLMAAS_API void   llmaas_io_memory_free(void * memory, size_t n_bytes); /* n_bytes as given to llmaas_io_memory();
                                                                         * memory may be NULL */

/* Return how many reads can be started now, or how many reads ahead, which leave a quarter of the depth to others. */
LLMAAS_API uint32_t llmaas_io_room(const llmaas_io * io);
LLMAAS_API uint32_t llmaas_io_room_ahead(const llmaas_io * io);

/* Start a read. It may not reach the kernel until the next poll or wait, which submit all started reads in one system
 * call. EINVAL: no room, zero bytes, n_needed above n_bytes, or an offset no file can have. ESPACE: out of memory in a
 * forked child. A read that was not started is done, with an error. */
LLMAAS_API llmaas_status llmaas_io_start(llmaas_io * io, llmaas_io_read * read);

/* Mark the reads that are done by now; do not wait for others. */
LLMAAS_API void llmaas_io_poll(llmaas_io * io);

/* Wait until a started read is done, or until all are. Other reads may complete meanwhile. */
LLMAAS_API void llmaas_io_wait(llmaas_io * io, const llmaas_io_read * read);
LLMAAS_API void llmaas_io_drain(llmaas_io * io);

/* Call around reads that this thread waits for without an engine, so that reads ahead give way to them too. */
LLMAAS_API void llmaas_io_begin_waiting(void);
LLMAAS_API void llmaas_io_end_waiting(void);

/* Measure the throughput, in bytes per second, of sequential reads of n_bytes with `depth` in flight. Reads a file of
 * n_file bytes into huge pages for about `seconds`. EIO: a read failed (errno). EINVAL: n_bytes is not a multiple of
 * 4096 or exceeds the file; or as for llmaas_io_open(). */
LLMAAS_API llmaas_status llmaas_io_measure(
    llmaas_io_kind kind, int fd, uint64_t n_file, uint32_t n_bytes, uint32_t depth, double seconds, double * rate);

/* Wait for all reads, then free the engine. NULL is allowed. */
LLMAAS_API void llmaas_io_close(llmaas_io * io);

#endif
