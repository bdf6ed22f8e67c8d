/* What ways of reading share (io.c), and what each of them does (io_uring.c, io_threads.c). */
#ifndef LLMAAS_IO_BACKEND_H
#define LLMAAS_IO_BACKEND_H

#include "llmaas/io.h"

typedef struct llmaas_io_backend {
    llmaas_io_kind kind;
    uint32_t       n_at_once; /* reads that are under way at a time, at most */
    llmaas_status (* open)(uint32_t depth, void ** state);
    void (* close)(void * state); /* nothing is in flight */
    void (* abandon)(void * state); /* give a child's copy back; the parent's goes on, with whatever is in flight */
    void (* start)(void * state, llmaas_io_read * read);

    /* Reads that are done, as a list. A patient call waits for one if there is none; some read is in flight. */
    llmaas_io_read * (* collect)(void * state, bool is_patient);

    /* Nothing is in flight. */
    void (* use_region)(void * state, void * memory, size_t n_bytes);
} llmaas_io_backend;

extern const llmaas_io_backend llmaas_io_uring, llmaas_io_threads;

/* Where in the buffer a read goes on after a short one: at a block boundary, for O_DIRECT. */
uint32_t llmaas_io_resume_at(const llmaas_io_read * read);

/* Take what a system call from there on returned: bytes, or -errno. Whether the read is complete, with its error set. A vector
 * begins where the read goes on. */
bool llmaas_io_take(llmaas_io_read * read, int64_t result);

/* Do what is left of a read here and now. */
void llmaas_io_read_now(llmaas_io_read * read);

#endif
