#include "io_backend.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

enum { MAX_THREADS = 16 };

/* A first-in, first-out queue. */
typedef struct queue {
    llmaas_io_read * reads[LLMAAS_IO_MAX_DEPTH];
    uint32_t         first, n;
} queue;

typedef struct crew {
    pthread_mutex_t  lock; /* guards the members below, except ids, which only the engine's user accesses */
    pthread_cond_t   has_work, has_result;
    queue            waiting;
    llmaas_io_read * done; /* a list */
    uint32_t         n_idle;
    bool             is_closing;
    uint32_t         max_threads, n_threads;
    pthread_t        ids[MAX_THREADS];
} crew;

static void push(queue * q, llmaas_io_read * read) { q->reads[(q->first + q->n++) % LLMAAS_IO_MAX_DEPTH] = read; }

static llmaas_io_read * pop(queue * q) {
    llmaas_io_read * read = q->reads[q->first];
    q->first = (q->first + 1) % LLMAAS_IO_MAX_DEPTH;
    q->n--;
    return read;
}

static void add_done(crew * c, llmaas_io_read * read) {
    read->next = c->done;
    c->done    = read;
}

/* -- workers ------------------------------------------------------------------------------------------------------- */

static bool await_work(crew * c) {
    c->n_idle++;
    while (c->waiting.n == 0 && !c->is_closing) {
        pthread_cond_wait(&c->has_work, &c->lock);
    }
    c->n_idle--;
    return c->waiting.n > 0;
}

static void * work(void * context) {
    crew * c = context;
    pthread_mutex_lock(&c->lock);
    while (await_work(c)) {
        llmaas_io_read * read = pop(&c->waiting);
        pthread_mutex_unlock(&c->lock);
        llmaas_io_read_now(read);
        pthread_mutex_lock(&c->lock);
        add_done(c, read);
        pthread_cond_signal(&c->has_result);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* Start a worker with all signals blocked: they are for the program's own threads. */
static void add_worker(crew * c) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&c->ids[c->n_threads], NULL, work, c) == 0) {
        c->n_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* -- calls of the engine ------------------------------------------------------------------------------------------- */

static llmaas_status threads_open(uint32_t depth, void ** state) {
    crew * c = calloc(1, sizeof *c);
    if (!c) {
        return LLMAAS_ESPACE;
    }
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->has_work, NULL);
    pthread_cond_init(&c->has_result, NULL);
    c->max_threads = depth < MAX_THREADS ? depth : MAX_THREADS;
    *state = c;
    return LLMAAS_OK;
}

static void threads_close(void * state) {
    crew * c = state;
    pthread_mutex_lock(&c->lock);
    c->is_closing = true;
    pthread_cond_broadcast(&c->has_work);
    pthread_mutex_unlock(&c->lock);
    for (uint32_t i = 0; i < c->n_threads; ++i) {
        pthread_join(c->ids[i], NULL);
    }
    pthread_cond_destroy(&c->has_result);
    pthread_cond_destroy(&c->has_work);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

/* Free a child's copy; the child has none of the threads. */
static void threads_abandon(void * state) { free(state); }

static void threads_start(void * state, llmaas_io_read * read) {
    crew * c = state;
    pthread_mutex_lock(&c->lock);
    push(&c->waiting, read);
    if (c->waiting.n > c->n_idle && c->n_threads < c->max_threads) {
        add_worker(c);
    }
    if (c->n_threads == 0) { /* the system provides no thread: read here */
        llmaas_io_read_now(pop(&c->waiting));
        add_done(c, read);
    }
    pthread_cond_signal(&c->has_work);
    pthread_mutex_unlock(&c->lock);
}

static llmaas_io_read * threads_collect(void * state, bool is_patient) {
    crew * c = state;
    pthread_mutex_lock(&c->lock);
    while (is_patient && !c->done) {
        pthread_cond_wait(&c->has_result, &c->lock);
    }
    llmaas_io_read * done = c->done;
    c->done               = NULL;
    pthread_mutex_unlock(&c->lock);
    return done;
}

static void threads_use_region(void * state, void * memory, size_t n_bytes) { (void) state, (void) memory, (void) n_bytes; }

const llmaas_io_backend llmaas_io_threads = {
    .kind       = LLMAAS_IO_THREADS,
    .n_at_once  = MAX_THREADS,
    .open       = threads_open,
    .close      = threads_close,
    .abandon    = threads_abandon,
    .start      = threads_start,
    .collect    = threads_collect,
    .use_region = threads_use_region,
};
