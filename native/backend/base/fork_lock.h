/* Forks of the process: whatever other threads hold or change at that moment is lost to the child. */
#ifndef LLMAAS_FORK_LOCK_H
#define LLMAAS_FORK_LOCK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

/* A mutex that a forked child never finds held. A fork waits up to a second for other holders, but not while a graph is
 * computed or llama.cpp is called. Those may take long, or wait for something that the forking thread holds, such as
 * Python's lock for a log callback. In that case the data under the mutex is void in the child. A holder that a fork
 * waits for must not take, create or destroy another fork lock: the fork may hold that one, and holds the list of
 * all. */
typedef struct llmaas_fork_lock {
    pthread_mutex_t           mutex;
    atomic_bool               is_computing; /* set by a holder that computes or calls llama.cpp */
    bool                      is_ours;      /* during a fork: the forking thread holds the mutex */
    bool                      is_void;
    void (*in_child)(struct llmaas_fork_lock * lock); /* NULL: nothing to do */
    struct llmaas_fork_lock * previous, * next;
} llmaas_fork_lock;

/* Initialize the lock. in_child: called first in a forked child, to forget what other threads held; may be NULL. False
 * if out of memory. */
bool llmaas_fork_lock_init(llmaas_fork_lock * lock, void (*in_child)(llmaas_fork_lock * lock));
void llmaas_fork_lock_destroy(llmaas_fork_lock * lock);

#endif
