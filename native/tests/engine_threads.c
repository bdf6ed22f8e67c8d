/* Engines on many threads, under ThreadSanitizer (tsan.sh), making the calls to ggml that llama.cpp makes.
 *
 *   engine_threads n_rounds
 *
 * Workers create contexts, evaluate tokens on two threads each, and free the contexts, every other one on another
 * thread. Meanwhile other threads switch levels, exchange extents, change budgets, subscribe taps and read them, load
 * models, activate again, and evaluate on a plain CPU backend. */
#include "engine_threads.h"

#include "ggml-cpu.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

enum { N_WORKERS = 3, N_MODELS = 3 };

static model       models[N_MODELS];
static int         n_rounds;
static atomic_int  n_working = N_WORKERS;

/* Activations write-lock this; loading a model or making a context read-locks it. */
static pthread_rwlock_t activation = PTHREAD_RWLOCK_INITIALIZER;

/* A worker's engine, shared with other threads: it exists while they hold the lock. */
static struct shown {
    pthread_mutex_t  lock;
    llmaas_engine *  engine;
    llmaas_density * density;
    llmaas_hidden_states *  states;
} shown[N_WORKERS];

static void show(struct shown * s, llmaas_engine * engine) {
    pthread_mutex_lock(&s->lock);
    s->engine = engine;
    pthread_mutex_unlock(&s->lock);
}

/* A context that nobody uses any more, with its subscriptions. */
typedef struct grave {
    context          c;
    llmaas_density * density;
    llmaas_hidden_states *  states;
    pthread_t        digger;
    bool             is_dug; /* by a thread of its own */
} grave;

static void * bury(void * arg) {
    grave * g = arg;
    close_context(&g->c);
    llmaas_density_free(g->density);
    llmaas_hidden_states_free(g->states);
    return NULL;
}

static llmaas_engine * create(context * c, uint64_t variant) {
    pthread_rwlock_rdlock(&activation);
    llmaas_engine * engine = create_context(c, &models[variant / 4 % N_MODELS], variant);
    pthread_rwlock_unlock(&activation);
    return engine;
}

/* Run a context from creation to end, or until another thread ends it. */
static void work_once(struct shown * s, grave * g, uint64_t variant) {
    float           first[N_OUT], again[N_OUT];
    llmaas_engine * engine = create(&g->c, variant);
    generate(&g->c, first); /* at level 0: all of every weight */
    show(s, engine);
    for (int i = 0; i < 3; ++i) {
        generate(&g->c, again); /* at any level */
    }
    pthread_mutex_lock(&s->lock); /* nobody switches now or later */
    llmaas_engine_set_level(engine, -1);
    llmaas_engine_set_narrow(engine, false);
    generate(&g->c, again);
    CHECK(memcmp(first, again, sizeof first) == 0);
    g->density = s->density;
    g->states  = s->states;
    g->is_dug  = variant % 2;
    s->engine  = NULL;
    s->density = NULL;
    s->states  = NULL;
    pthread_mutex_unlock(&s->lock);
    if (g->is_dug) {
        CHECK(pthread_create(&g->digger, NULL, bury, g) == 0);
    } else {
        bury(g);
    }
}

static void * work(void * arg) {
    const int worker    = *(const int *) arg;
    grave     graves[2] = {{.is_dug = false}};
    for (int i = 0; i < n_rounds; ++i) {
        grave * before = &graves[(i + 1) % 2];
        work_once(&shown[worker], &graves[i % 2], (uint64_t) (i * N_WORKERS + worker));
        if (before->is_dug) {
            CHECK(pthread_join(before->digger, NULL) == 0);
        }
        before->is_dug = false;
    }
    for (int i = 0; i < 2; ++i) {
        if (graves[i].is_dug) {
            CHECK(pthread_join(graves[i].digger, NULL) == 0);
        }
    }
    n_working--;
    return NULL;
}

static void listen_or_stop(struct shown * s) {
    if (!s->density) {
        s->density           = llmaas_density_new(N_CTX, N_LAYER, 1, 1);
        s->states            = llmaas_hidden_states_new(LLMAAS_TAP_FFN_INPUT, 1, D, 8);
        const llmaas_tap a = llmaas_density_tap(s->density), b = llmaas_hidden_states_tap(s->states);
        CHECK(llmaas_engine_subscribe(s->engine, &a) == LLMAAS_OK);
        CHECK(llmaas_engine_subscribe(s->engine, &b) == LLMAAS_OK);
    } else {
        CHECK(llmaas_engine_unsubscribe(s->engine, s->density) == LLMAAS_OK);
        CHECK(llmaas_engine_unsubscribe(s->engine, s->states) == LLMAAS_OK);
        llmaas_density_free(s->density);
        llmaas_hidden_states_free(s->states);
        s->density = NULL;
        s->states  = NULL;
    }
}

static void read_all(struct shown * s) {
    double              sums[N_CTX];
    uint64_t            counts[N_CTX], n_lost;
    float               rows[8 * D];
    uint32_t            n_taken;
    llmaas_engine_stats stats;
    llmaas_engine_read_stats(s->engine, &stats);
    CHECK(stats.n_passed <= stats.n_graphs);
    CHECK(llmaas_engine_cells(s->engine).n_cells <= N_CTX);
    llmaas_engine_untouched(s->engine);
    if (s->density) {
        CHECK(llmaas_density_read(s->density, N_CTX, sums, counts) == LLMAAS_OK);
        CHECK(llmaas_hidden_states_take(s->states, 8, rows, &n_taken, &n_lost) == LLMAAS_OK);
    }
}

/* Exchange extents of a weight that may be in use. */
static void exchange(uint32_t i) {
    const int64_t extents[] = {LLMAAS_ALL, i % 7 ? 96 : 0, i % 2 ? 64 : LLMAAS_ALL};
    const char *  name      = i % 3 ? "blk.0.ffn_down.weight" : "blk.1.ffn_gate.weight";
    CHECK(llmaas_weights_set_part(models[i % N_MODELS].weights, name, extents, 3) == LLMAAS_OK);
}

/* Set the budget of a model that may be being read for a graph. */
static void set_budget(uint32_t i) {
    llmaas_weights *     weights = models[ON_DISK].weights;
    const llmaas_reading reading = {i % 9, 4096 * (i % 5), -1};
    llmaas_stream_stats  stats;
    llmaas_weights_read_stats(weights, &stats);
    CHECK(stats.n_kept <= stats.n_bytes);
    const uint64_t n_kept = stats.n_bytes * (i % 4) / 3, n_arena = i % 3 << 16;
    if (i % 5 == 0) {
        CHECK(llmaas_weights_set_reading(weights, &reading) == LLMAAS_OK);
    } else if (i % 2) {
        CHECK(llmaas_weights_set_memory(weights, n_kept, n_arena) == LLMAAS_OK);
    } else {
        llmaas_weights_try_set_memory(weights, n_kept, n_arena);
    }
}

static void * meddle(void * arg) {
    for (uint32_t i = 0; n_working > 0; ++i) {
        struct shown * s = &shown[i % N_WORKERS];
        exchange(i);
        set_budget(i);
        pthread_mutex_lock(&s->lock);
        if (s->engine) {
            llmaas_engine_set_level(s->engine, (int32_t) (i / 3 % 5) - 1);
            llmaas_engine_set_narrow(s->engine, i / 6 % 2);
            read_all(s);
            if (i % 5 < 2) {
                listen_or_stop(s);
            }
        }
        pthread_mutex_unlock(&s->lock);
        CHECK(llmaas_engine_count() <= 3 * N_WORKERS);
        usleep(500);
    }
    (void) arg;
    return NULL;
}

static void * load_others(void * arg) {
    for (int i = 0; n_working > 0; ++i) {
        model m;
        pthread_rwlock_rdlock(&activation);
        load_model(&m, (model_kind) (i % 3));
        pthread_rwlock_unlock(&activation);
        unload_model(&m);
        usleep(2000);
    }
    (void) arg;
    return NULL;
}

/* Activate again while engines of earlier activations compute; every other time a second suite is activated and
 * ended. */
static void * activate_anew(void * arg) {
    for (int i = 0; n_working > 0; ++i) {
        pthread_rwlock_wrlock(&activation);
        if (i % 2) {
            llmaas_register();
            llmaas_unregister();
            CHECK(llmaas_backend_registered());
        } else {
            llmaas_unregister();
            CHECK(!llmaas_backend_registered());
            llmaas_register();
        }
        pthread_rwlock_unlock(&activation);
        usleep(2000);
    }
    (void) arg;
    return NULL;
}

/* Evaluate continuously on a plain backend, as an app without an engine does. */
static void * stay_vanilla(void * arg) {
    context c;
    float   first[N_OUT], again[N_OUT];
    open_context(&c, &models[REPACKED], ggml_backend_cpu_init(), 1);
    generate(&c, first);
    while (n_working > 0) {
        generate(&c, again);
        CHECK(memcmp(first, again, sizeof first) == 0);
    }
    close_context(&c);
    (void) arg;
    return NULL;
}

static void no_log(enum ggml_log_level level, const char * text, void * user) {
    (void) level, (void) text, (void) user;
}

int main(int argc, char ** argv) {
    void * (*const others[])(void *) = {meddle, load_others, activate_anew, stay_vanilla};
    enum { N_OTHERS = sizeof others / sizeof *others };
    pthread_t threads[N_WORKERS + N_OTHERS];
    int       workers[N_WORKERS];
    n_rounds = argc > 1 ? atoi(argv[1]) : 1;
    ggml_log_set(no_log, NULL);
    CHECK(!llmaas_ggml_refusal());
    llmaas_register();
    for (int i = 0; i < N_MODELS; ++i) {
        load_model(&models[i], (model_kind) i);
    }
    for (int i = 0; i < N_WORKERS; ++i) {
        workers[i] = i;
        CHECK(pthread_mutex_init(&shown[i].lock, NULL) == 0);
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (int i = 0; i < N_OTHERS; ++i) {
        CHECK(pthread_create(&threads[N_WORKERS + i], NULL, others[i], NULL) == 0);
    }
    for (int i = 0; i < N_WORKERS + N_OTHERS; ++i) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    llmaas_unregister();
    CHECK(llmaas_engine_count() == 0 && !llmaas_backend_registered());
    for (int i = 0; i < N_MODELS; ++i) {
        unload_model(&models[i]);
    }
    return 0;
}
