/* Life cycle of engines in one process: random operations on models, contexts, levels and taps, in random order.
 *
 *   engine_life seed n_operations adapter.gguf model.gguf...
 *
 * The adapter is for the first model. tests/engine/test_engine_life.py builds this program against libllama and runs
 * it. */
#include "engine_life.h"

struct life life;

bool one_in(uint32_t n) { return rnd_below(n) == 0; }

model * any_model(bool is_loaded) {
    const uint32_t first = rnd_below(MAX_MODELS);
    for (uint32_t i = 0; i < MAX_MODELS; ++i) {
        model * m = &life.models[(first + i) % MAX_MODELS];
        if ((m->llama != NULL) == is_loaded) {
            return m;
        }
    }
    return NULL;
}

context * any_context(bool is_open) {
    const uint32_t first = rnd_below(MAX_CONTEXTS);
    for (uint32_t i = 0; i < MAX_CONTEXTS; ++i) {
        context * c = &life.contexts[(first + i) % MAX_CONTEXTS];
        if ((c->llama != NULL) == is_open) {
            return c;
        }
    }
    return NULL;
}

static struct operation {
    const char * name;
    bool (*run)(void);
    uint32_t weight;
    uint64_t n_done;
} operations[] = {
    {"load", do_load, 3, 0},       {"unload", do_unload, 1, 0},   {"open", do_open, 5, 0},
    {"vain", do_open_in_vain, 1, 0}, {"close", do_close, 3, 0},   {"decode", do_decode, 30, 0},
    {"reset", do_reset, 10, 0},    {"restore", do_restore, 4, 0}, {"adapt", do_adapt, 4, 0},
    {"switch", do_switch, 10, 0},  {"listen", do_listen, 10, 0},  {"read", do_read, 10, 0},
    {"abort", do_abort, 3, 0},     {"compare", do_compare, 2, 0},
    {"budget", do_budget, 10, 0},  {"exchange", do_exchange, 10, 0},
};
enum { N_KINDS = sizeof operations / sizeof *operations };

static struct operation * any_operation(void) {
    uint32_t total = 0;
    for (int i = 0; i < N_KINDS; ++i) {
        total += operations[i].weight;
    }
    uint32_t at = rnd_below(total);
    int      i  = 0;
    while (at >= operations[i].weight) {
        at -= operations[i++].weight;
    }
    return &operations[i];
}

static void check_registration(void) {
    uint32_t n_engines = 0;
    for (int i = 0; i < MAX_CONTEXTS; ++i) {
        n_engines += life.contexts[i].engine != NULL;
    }
    CHECK(llmaas_engine_count() == n_engines);
    CHECK(llmaas_backend_registered());
}

static void finish(void) {
    while (do_unload()) {
        check_registration();
    }
    llmaas_unregister();
    CHECK(!llmaas_backend_registered());
    llama_batch_free(life.batch);
    ggml_threadpool_free(life.pool);
    llama_backend_free();
    for (int i = 0; i < N_KINDS; ++i) {
        printf("%s %llu, ", operations[i].name, (unsigned long long) operations[i].n_done);
    }
    printf("compared %llu, aborted %llu, refused %llu\n", (unsigned long long) life.n_compared,
           (unsigned long long) life.n_aborted, (unsigned long long) life.n_refused);
}

static void no_log(enum ggml_log_level level, const char * text, void * user) {
    (void) level, (void) text, (void) user;
}

int main(int argc, char ** argv) {
    CHECK(argc > 4);
    check_seed   = strtoull(argv[1], NULL, 10);
    life.adapter = argv[3];
    life.paths   = argv + 4;
    life.n_paths = (uint32_t) argc - 4;
    fprintf(stderr, "seed %s\n", argv[1]);
    llama_log_set(no_log, NULL);
    llama_backend_init();
    CHECK(!llmaas_ggml_refusal());
    llmaas_register();
    struct ggml_threadpool_params params = ggml_threadpool_params_default(N_THREADS);
    life.pool  = ggml_threadpool_new(&params);
    life.batch = llama_batch_init(MAX_BATCH, 0, 1);
    for (unsigned long n = strtoul(argv[2], NULL, 10); n > 0;) {
        struct operation * operation = any_operation();
        if (operation->run()) {
            operation->n_done++;
            n--;
            check_registration();
        }
    }
    finish();
    return 0;
}
