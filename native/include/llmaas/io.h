/* Asynchronous reads of files, many at a time: through io_uring, or by threads where the kernel has none to give.
 *
 * One thread at a time uses an engine; it need not be always the same one. Reads get done within the calls of whoever uses
 * the engine, never behind its back. A child of a process that forks goes on with its copy of an engine: reads that were in flight are made
 * again there, but those to vectors fail with ECANCELED. If another thread was using the engine then, it can only be closed.
 *
 * Reads ahead give way to those that somebody waits for: they get on their way behind all others of their engine, and one at a
 * time while any other thread of the process waits for a read. */
#ifndef LLMAAS_IO_H
#define LLMAAS_IO_H

#include "llmaas/base.h"

#include <stdbool.h>
#include <sys/uio.h>

#define LLMAAS_IO_MAX_DEPTH 256u

typedef struct llmaas_io llmaas_io;

typedef enum llmaas_io_kind {
    LLMAAS_IO_BEST    = 0, /* io_uring, else threads */
    LLMAAS_IO_URING   = 1,
    LLMAAS_IO_THREADS = 2, /* as many as there are reads in flight, up to 16 */
} llmaas_io_kind;

/* One read of a file or block device. If fd is open with O_DIRECT then offset, n_bytes and buffer are multiples of 4096.
 * It is done with n_needed bytes: what follows them is read if the same system call gives it, so that a last block may be
 * short. The struct and the buffer stay where they are until the read is done.
 *
 * What lies together in the file may be read to several places: pieces of whole blocks, n_bytes in all, as a vector that is the
 * engine's until the read is done. */
typedef struct llmaas_io_read {
    int      fd;
    uint64_t offset;
    uint32_t n_bytes;
    uint32_t n_needed; /* at most n_bytes */
    void *   buffer;   /* or NULL and a vector */
    struct iovec * vector;
    uint32_t n_pieces; /* at most IOV_MAX */
    bool     is_ahead; /* nobody waits for it yet; once somebody does it gives way no more */
    int32_t  error;    /* when done: 0, or an errno; ENODATA: the file ends before n_needed */
    bool     is_done;
    uint32_t n_read;   /* the engine's own, as is what follows */
    struct llmaas_io_read * next;
} llmaas_io_read;

/* An engine for up to depth reads in flight, 1..LLMAAS_IO_MAX_DEPTH. EINVAL: depth or kind. EUNSUPPORTED: io_uring was asked
 * for, and the system lacks it or forbids it. ESPACE: out of memory. */
LLMAAS_API llmaas_status  llmaas_io_open(llmaas_io_kind kind, uint32_t depth, llmaas_io ** io);
LLMAAS_API llmaas_io_kind llmaas_io_kind_of(const llmaas_io * io); /* never BEST */

/* Tell which memory most reads go to, to spare io_uring some work for each of them; replaces what was told before, and
 * n_bytes of 0 takes it back. All of its pages are then in RAM and stay there, and reads go to those very pages: memory that
 * is unmapped, or given back with madvise(), is told anew first. The kernel may refuse, say for RLIMIT_MEMLOCK, and threads
 * have no use for it: that is OK too, and changes nothing. EINVAL: reads are in flight. */
LLMAAS_API llmaas_status llmaas_io_register(llmaas_io * io, void * memory, size_t n_bytes);

/* Memory to read to: huge pages where the system has them, as a read pins its pages one by one, and one to scattered pages is cut
 * up on its way to the disk. n_bytes is rounded up to LLMAAS_IO_HUGE_PAGE. NULL: out of memory. */
#define LLMAAS_IO_HUGE_PAGE ((size_t) 2 << 20)
LLMAAS_API void * llmaas_io_memory(size_t n_bytes);
LLMAAS_API void   llmaas_io_memory_free(void * memory, size_t n_bytes); /* as many as it was made with; NULL is fine */

/* Reads that can be started now; and those of them that can be reads ahead, which leave a quarter of the depth to others. */
LLMAAS_API uint32_t llmaas_io_room(const llmaas_io * io);
LLMAAS_API uint32_t llmaas_io_room_ahead(const llmaas_io * io);

/* Start a read, which may wait for the next poll or wait to get on its way: those pass all that were started to the kernel in
 * one system call. EINVAL: no room, no bytes, more needed than read, or no place that a file can have. */
LLMAAS_API llmaas_status llmaas_io_start(llmaas_io * io, llmaas_io_read * read);

/* Mark the reads that are done by now, without waiting for others. */
LLMAAS_API void llmaas_io_poll(llmaas_io * io);

/* Wait until a started read is done, or all are; others may get done as well. */
LLMAAS_API void llmaas_io_wait(llmaas_io * io, const llmaas_io_read * read);
LLMAAS_API void llmaas_io_drain(llmaas_io * io);

/* Around reads that this thread waits for without an engine: reads ahead of others give way to them, too. */
LLMAAS_API void llmaas_io_begin_waiting(void);
LLMAAS_API void llmaas_io_end_waiting(void);

/* Bytes a second that reads of n_bytes, `depth` of them at a time, one behind the other, get from a file of n_file bytes in
 * about so many seconds, into huge pages. EIO: a read failed (errno). EINVAL: n_bytes is no multiple of 4096, or more than the
 * file has; or as llmaas_io_open(). */
LLMAAS_API llmaas_status llmaas_io_measure(
    llmaas_io_kind kind, int fd, uint64_t n_file, uint32_t n_bytes, uint32_t depth, double seconds, double * rate);

/* Drains first; NULL is fine. */
LLMAAS_API void llmaas_io_close(llmaas_io * io);

#endif
