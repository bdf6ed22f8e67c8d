/* A tap's threads: all at once on a node, with a barrier between nodes, as in ggml-cpu's pool. */
#ifndef LLMAAS_TAP_THREADS_H
#define LLMAAS_TAP_THREADS_H

#include "check.h"

#include "llmaas/tap.h"

#include <pthread.h>

enum { MAX_THREADS = 4, MAX_VIEWS = 256 };

typedef struct pool {
    llmaas_tap              tap;
    const llmaas_tap_view * views;
    bool                    is_settled[MAX_VIEWS];
    int                     n_views;
    int                     n_threads;
    pthread_barrier_t       barrier;
} pool;

typedef struct pool_thread {
    pool * pool;
    int    ith;
} pool_thread;

static inline void * pool_work(void * arg) {
    const pool_thread * self = arg;
    pool *              p    = self->pool;
    for (int i = 0; i < p->n_views; ++i) {
        pthread_barrier_wait(&p->barrier);
        if (!p->is_settled[i]) {
            p->tap.run(p->tap.user, &p->views[i], self->ith, p->n_threads);
        }
    }
    return NULL;
}

static inline void run_tap(llmaas_tap tap, const llmaas_tap_view * views, int n_views, int n_threads) {
    pool        p = {.tap = tap, .views = views, .n_views = n_views, .n_threads = n_threads};
    pthread_t   threads[MAX_THREADS];
    pool_thread args[MAX_THREADS];
    CHECK(n_views <= MAX_VIEWS);
    for (int i = 0; i < n_views; ++i) { /* as the engine does, before the graph is computed */
        p.is_settled[i] = tap.settles && tap.settles(tap.user, &views[i]);
    }
    CHECK(pthread_barrier_init(&p.barrier, NULL, (unsigned) n_threads) == 0);
    for (int i = 0; i < n_threads; ++i) {
        args[i] = (pool_thread){&p, i};
        CHECK(pthread_create(&threads[i], NULL, pool_work, &args[i]) == 0);
    }
    for (int i = 0; i < n_threads; ++i) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    pthread_barrier_destroy(&p.barrier);
}

static inline struct ggml_context * context_new(void) {
    struct ggml_context * ctx = ggml_init((struct ggml_init_params){.mem_size = 16u << 20});
    CHECK(ctx);
    return ctx;
}

#endif
