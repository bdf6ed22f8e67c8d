/* The interface of the backends (io_uring.c, io_threads.c), and helpers that they share (io.c). */
#ifndef LLMAAS_IO_BACKEND_H
#define LLMAAS_IO_BACKEND_H

#include "llmaas/io.h"

typedef struct llmaas_io_backend {
    llmaas_io_kind kind;
    uint32_t       n_at_once; /* most reads in flight at a time */
    llmaas_status (* open)(uint32_t depth, void ** state);
    void (* close)(void * state); /* called with nothing in flight */
    void (* abandon)(void * state); /* free a forked child's copy; the parent's goes on, with reads in flight */
    void (* start)(void * state, llmaas_io_read * read);

    /* Return the list of reads that are done. If there is none, a patient call waits for one; some read is in
     * flight. */
    llmaas_io_read * (* collect)(void * state, bool is_patient);

    /* Set the registered memory; called with nothing in flight. */
    void (* use_region)(void * state, void * memory, size_t n_bytes);
} llmaas_io_backend;

extern const llmaas_io_backend llmaas_io_uring, llmaas_io_threads;

/* Return where in the buffer a read resumes after a short one: at a block boundary, for O_DIRECT. */
uint32_t llmaas_io_resume_at(const llmaas_io_read * read);

/* Process the result of a system call that started there: bytes, or -errno. Return whether the read is complete, with
 * its error set. Advance a vector to where the read resumes. */
bool llmaas_io_take(llmaas_io_read * read, int64_t result);

/* Do the rest of a read synchronously. */
void llmaas_io_read_now(llmaas_io_read * read);

#endif
