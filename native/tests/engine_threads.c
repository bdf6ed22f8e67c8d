/* Engines on many threads, under ThreadSanitizer (tsan.sh): what llama.cpp does with ggml, done here without it.
 *
 *     engine_threads n_rounds
 *
 * Workers create contexts, evaluate tokens on two threads each, and free them again; meanwhile others switch levels, exchange
 * extents, listen, read what was heard, load models, and evaluate on a plain CPU backend. */
#include "engine_threads.h"

#include "ggml-cpu.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

enum { N_WORKERS = 3, N_MODELS = 3 };

static model       models[N_MODELS];
static int         n_rounds;
static atomic_int  n_working = N_WORKERS;

/* What a worker shows the others: its engine is there while they hold the lock. */
static struct shown {
    pthread_mutex_t  lock;
    llmaas_engine *  engine;
    llmaas_density * density;
    llmaas_states *  states;
} shown[N_WORKERS];

static void show(struct shown * s, llmaas_engine * engine) {
    pthread_mutex_lock(&s->lock);
    s->engine = engine;
    pthread_mutex_unlock(&s->lock);
}

/* A context from its creation to its end. */
static void work_once(struct shown * s, uint64_t variant) {
    context         c;
    float           first[N_OUT], again[N_OUT];
    llmaas_engine * engine = create_context(&c, &models[variant / 4 % N_MODELS], variant);
    generate(&c, first); /* at level 0: all of every weight */
    show(s, engine);
    for (int i = 0; i < 3; ++i) {
        generate(&c, again); /* at whatever level */
    }
    pthread_mutex_lock(&s->lock); /* nobody switches now, nor from here on */
    llmaas_engine_set_level(engine, -1);
    generate(&c, again);
    CHECK(memcmp(first, again, sizeof first) == 0);
    close_context(&c); /* and the subscriptions with it */
    llmaas_density_free(s->density);
    llmaas_states_free(s->states);
    s->engine  = NULL;
    s->density = NULL;
    s->states  = NULL;
    pthread_mutex_unlock(&s->lock);
}

static void * work(void * arg) {
    const int worker = *(const int *) arg;
    for (int i = 0; i < n_rounds; ++i) {
        work_once(&shown[worker], (uint64_t) (i * N_WORKERS + worker));
    }
    n_working--;
    return NULL;
}

static void listen_or_stop(struct shown * s) {
    if (!s->density) {
        s->density           = llmaas_density_new(N_CTX, N_LAYER, 1, 1);
        s->states            = llmaas_states_new(LLMAAS_TAP_FFN_INPUT, 1, D, 8);
        const llmaas_tap a = llmaas_density_tap(s->density), b = llmaas_states_tap(s->states);
        CHECK(llmaas_engine_subscribe(s->engine, &a) == LLMAAS_OK);
        CHECK(llmaas_engine_subscribe(s->engine, &b) == LLMAAS_OK);
    } else {
        CHECK(llmaas_engine_unsubscribe(s->engine, s->density) == LLMAAS_OK);
        CHECK(llmaas_engine_unsubscribe(s->engine, s->states) == LLMAAS_OK);
        llmaas_density_free(s->density);
        llmaas_states_free(s->states);
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
    if (s->density) {
        CHECK(llmaas_density_read(s->density, N_CTX, sums, counts) == LLMAAS_OK);
        CHECK(llmaas_states_take(s->states, 8, rows, &n_taken, &n_lost) == LLMAAS_OK);
    }
}

/* Of a weight that is being multiplied with, perhaps. */
static void exchange(uint32_t i) {
    const int64_t extents[] = {LLMAAS_ALL, i % 7 ? 96 : 0, i % 2 ? 64 : LLMAAS_ALL};
    const char *  name      = i % 3 ? "blk.0.ffn_down.weight" : "blk.1.ffn_gate.weight";
    CHECK(llmaas_weights_set_part(models[i % N_MODELS].weights, name, extents, 3) == LLMAAS_OK);
}

static void * meddle(void * arg) {
    for (uint32_t i = 0; n_working > 0; ++i) {
        struct shown * s = &shown[i % N_WORKERS];
        exchange(i);
        pthread_mutex_lock(&s->lock);
        if (s->engine) {
            llmaas_engine_set_level(s->engine, (int32_t) (i / 3 % 5) - 1);
            read_all(s);
            if (i % 5 < 2) {
                listen_or_stop(s);
            }
        }
        pthread_mutex_unlock(&s->lock);
        CHECK(llmaas_engine_count() <= N_WORKERS);
        usleep(500);
    }
    (void) arg;
    return NULL;
}

static void * load_others(void * arg) {
    for (int i = 0; n_working > 0; ++i) {
        model m;
        load_model(&m, (model_kind) (i % 3));
        unload_model(&m);
        usleep(2000);
    }
    (void) arg;
    return NULL;
}

/* What an app that has no engine does, all the time. */
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
    void * (*const others[])(void *) = {meddle, load_others, stay_vanilla};
    pthread_t threads[N_WORKERS + 3];
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
    for (int i = 0; i < 3; ++i) {
        CHECK(pthread_create(&threads[N_WORKERS + i], NULL, others[i], NULL) == 0);
    }
    for (int i = 0; i < N_WORKERS + 3; ++i) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    llmaas_unregister();
    CHECK(llmaas_engine_count() == 0 && !llmaas_backend_registered());
    for (int i = 0; i < N_MODELS; ++i) {
        unload_model(&models[i]);
    }
    return 0;
}
