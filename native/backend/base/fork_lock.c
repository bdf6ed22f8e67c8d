#include "base/fork_lock.h"

#include <sched.h>
#include <stddef.h>
#include <time.h>

static pthread_mutex_t    list_lock = PTHREAD_MUTEX_INITIALIZER;
static llmaas_fork_lock * locks;

enum { PATIENCE_S = 1 }; /* other holders take microseconds, unless something is wrong */

static bool take(llmaas_fork_lock * lock, time_t until) {
    while (pthread_mutex_trylock(&lock->mutex) != 0) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (lock->is_computing || now.tv_sec > until) {
            return false;
        }
        sched_yield();
    }
    return true;
}

static void before(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    pthread_mutex_lock(&list_lock);
    for (llmaas_fork_lock * lock = locks; lock; lock = lock->next) {
        lock->is_ours = take(lock, now.tv_sec + PATIENCE_S);
    }
}

static void in_parent(void) {
    for (llmaas_fork_lock * lock = locks; lock; lock = lock->next) {
        if (lock->is_ours) {
            pthread_mutex_unlock(&lock->mutex);
        }
    }
    pthread_mutex_unlock(&list_lock);
}

static void in_child(void) {
    for (llmaas_fork_lock * lock = locks; lock; lock = lock->next) {
        lock->is_void      = lock->is_void || !lock->is_ours;
        lock->is_computing = false;
        pthread_mutex_init(&lock->mutex, NULL);
        if (lock->in_child) {
            lock->in_child(lock);
        }
    }
    pthread_mutex_init(&list_lock, NULL);
}

static void watch(void) { pthread_atfork(before, in_parent, in_child); }

bool llmaas_fork_lock_init(llmaas_fork_lock * lock, void (*in_child)(llmaas_fork_lock *)) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch);
    if (pthread_mutex_init(&lock->mutex, NULL) != 0) {
        return false;
    }
    lock->is_computing = lock->is_void = false;
    lock->in_child     = in_child;
    pthread_mutex_lock(&list_lock);
    lock->previous = NULL;
    lock->next     = locks;
    if (locks) {
        locks->previous = lock;
    }
    locks = lock;
    pthread_mutex_unlock(&list_lock);
    return true;
}

void llmaas_fork_lock_destroy(llmaas_fork_lock * lock) {
    pthread_mutex_lock(&list_lock);
    *(lock->previous ? &lock->previous->next : &locks) = lock->next;
    if (lock->next) {
        lock->next->previous = lock->previous;
    }
    pthread_mutex_unlock(&list_lock);
    pthread_mutex_destroy(&lock->mutex);
}
