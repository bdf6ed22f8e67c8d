/* Forks of the process: what other threads hold or change at that moment is lost to a child. */
#ifndef LLMAAS_FORKS_H
#define LLMAAS_FORKS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

/* A mutex that a child never finds held. A fork waits for other holders for a moment, but not while a graph is computed or
 * llama.cpp is called: that may take long, or wait for what the forking thread holds, such as Python's lock, which a log callback
 * needs. What the mutex guards is void in the child then. */
typedef struct llmaas_fork_lock {
    pthread_mutex_t           mutex;
    atomic_bool               is_computing; /* set by a holder that computes, or calls llama.cpp */
    bool                      is_ours;      /* during a fork */
    bool                      is_void;
    struct llmaas_fork_lock * previous, * next;
} llmaas_fork_lock;

bool llmaas_fork_lock_init(llmaas_fork_lock * lock);
void llmaas_fork_lock_destroy(llmaas_fork_lock * lock);

#endif
