/* The life of engines in one process: random operations on models, contexts, levels and taps, in any order.
 *
 *     engine_life seed n_operations adapter.gguf model.gguf...
 *
 * The adapter is for the first model. Built against libllama and run by tests/engine/test_engine_life.py. */
#include "check.h"

#include "llama.h"
#include "llmaas/engine.h"

#include <math.h>

enum { MAX_MODELS = 3, MAX_CONTEXTS = 4, N_SEQ = 2, N_CTX = 256, N_EMBD = 256, MAX_BATCH = 64, N_THREADS = 2 };

/* What is claimed of a model's matrices. */
enum { NOTHING = 0, PART = 1, TILES = 2, FROM_FILE = 4, N_CLAIMS = 6 };
static const int claim_kinds[N_CLAIMS] = {NOTHING, PART, TILES, TILES | PART, FROM_FILE, FROM_FILE | PART};

typedef struct model {
    struct llama_model *        llama;
    struct llama_adapter_lora * adapter; /* NULL: none fits */
    llmaas_weights *            weights; /* NULL: nothing is claimed */
    const char *                path;
    int                         claims;
    bool                        is_repacked; /* as tiles always are, and what is read from the file never is */
} model;

typedef struct context {
    struct llama_context *      llama;
    const model *               of;
    struct llama_context_params params;
    llmaas_engine *             engine; /* NULL: a vanilla context */
    llmaas_density *            density; /* subscribed, or NULL */
    llmaas_states *             states;
    bool                        has_adapter;
    int32_t                     level;
    int                         n_past[N_SEQ];
    llmaas_engine_stats         stats;
} context;

static struct {
    const char *        adapter;
    char **             paths;
    uint32_t            n_paths;
    model               models[MAX_MODELS];
    context             contexts[MAX_CONTEXTS];
    ggml_threadpool_t   pool;
    struct llama_batch  batch;
    uint64_t            n_compared, n_aborted, n_refused;
} life;

static bool one_in(uint32_t n) { return rnd_below(n) == 0; }

static model * any_model(bool is_loaded) {
    const uint32_t first = rnd_below(MAX_MODELS);
    for (uint32_t i = 0; i < MAX_MODELS; ++i) {
        model * m = &life.models[(first + i) % MAX_MODELS];
        if ((m->llama != NULL) == is_loaded) {
            return m;
        }
    }
    return NULL;
}

static context * any_context(bool is_open) {
    const uint32_t first = rnd_below(MAX_CONTEXTS);
    for (uint32_t i = 0; i < MAX_CONTEXTS; ++i) {
        context * c = &life.contexts[(first + i) % MAX_CONTEXTS];
        if ((c->llama != NULL) == is_open) {
            return c;
        }
    }
    return NULL;
}

static context * any_engine(void) {
    context * c = any_context(true);
    return c && c->engine ? c : NULL;
}

/* -- models -------------------------------------------------------------------------------------------------------- */

/* Names that stay valid while a model is loaded, and one more that ends the list. */
enum { MAX_CLAIMED = 32 };
static char                                      patterns[MAX_CLAIMED][80];
static struct llama_model_tensor_buft_override overrides[MAX_CLAIMED + 1];

static bool is_matrix(const char * name) {
    const bool is_wanted = strstr(name, ".ffn_") || strstr(name, ".attn_output.");
    return is_wanted && !strstr(name, "norm") && !strstr(name, "gate_inp");
}

static void claim(model * m, const llmaas_tensor_info * info, uint32_t * n_overrides) {
    static const int64_t extents[] = {0, 128, 64};
    const bool           is_input  = strstr(info->name, "down") || strstr(info->name, "attn_output");
    if (m->claims & PART) {
        const llmaas_axis axis = is_input ? LLMAAS_COLUMNS : LLMAAS_ROWS;
        CHECK(llmaas_weights_claim_part(m->weights, info->name, axis, extents, 3) == LLMAAS_OK);
        CHECK(llmaas_weights_claim_part(m->weights, info->name, axis, extents, 3) == LLMAAS_EINVAL);
    }
    if (m->claims & TILES) {
        CHECK(llmaas_weights_claim_tiles(m->weights, info->name) == LLMAAS_OK);
    }
    if (m->claims & FROM_FILE) {
        CHECK(llmaas_weights_claim_file(m->weights, info->name, m->path, info->offset) == LLMAAS_OK);
    }
    if (m->claims & (TILES | FROM_FILE)) {
        CHECK(*n_overrides < MAX_CLAIMED);
        char * pattern = patterns[*n_overrides];
        snprintf(pattern, sizeof *patterns, "^%s$", info->name);
        overrides[(*n_overrides)++] = (struct llama_model_tensor_buft_override){pattern, llmaas_buffer_type()};
    }
}

static void claim_all(model * m) {
    llmaas_tensor_info * infos;
    uint32_t             n, n_claimed = 0, n_overrides = 0;
    m->weights = llmaas_weights_new();
    CHECK(m->weights && llmaas_gguf_tensors(m->path, &infos, &n) == LLMAAS_OK);
    for (uint32_t i = 0; i < n; ++i) {
        if (is_matrix(infos[i].name) && (n_claimed == 0 || one_in(2))) {
            claim(m, &infos[i], &n_overrides);
            n_claimed++;
        }
    }
    overrides[n_overrides] = (struct llama_model_tensor_buft_override){0};
    llmaas_gguf_tensors_free(infos);
}

static bool stop_loading(float progress, void * user) {
    (void) progress, (void) user;
    return false;
}

static void unload(model * m) {
    llama_model_free(m->llama);
    llmaas_weights_release(m->weights);
    *m = (model){0};
}

/* Load `m->path` with `m->claims`; false: not this time. */
static bool load(model * m, bool is_stopped) {
    struct llama_model_params params = llama_model_default_params();
    params.use_extra_bufts           = m->is_repacked;
    params.progress_callback         = is_stopped ? stop_loading : NULL;
    params.n_gpu_layers              = 0;
    overrides[0]                     = (struct llama_model_tensor_buft_override){0};
    if (m->claims) {
        claim_all(m);
        params.tensor_buft_overrides = overrides;
    }
    llmaas_load_begin(m->weights);
    m->llama = llama_model_load_from_file(m->path, params);
    llmaas_load_end();
    CHECK((m->llama == NULL) == is_stopped);
    if (m->llama && strcmp(m->path, life.paths[0]) == 0) {
        m->adapter = llama_adapter_lora_init(m->llama, life.adapter);
        CHECK(m->adapter);
    }
    if (m->llama && m->weights && llmaas_weights_problem(m->weights, false)) {
        life.n_refused++;
        unload(m);
    }
    return m->llama != NULL;
}

static bool do_load(void) {
    model * m = any_model(false);
    if (!m) {
        return false;
    }
    m->path        = life.paths[rnd_below(life.n_paths)];
    m->claims      = claim_kinds[rnd_below(N_CLAIMS)];
    m->is_repacked = m->claims & TILES || (!(m->claims & FROM_FILE) && !one_in(4));
    if (!load(m, one_in(10))) {
        llmaas_weights_release(m->weights);
        *m = (model){0};
    }
    return true;
}

static void close_context(context * c);

static bool do_unload(void) {
    model * m = any_model(true);
    if (!m) {
        return false;
    }
    for (int i = 0; i < MAX_CONTEXTS; ++i) {
        if (life.contexts[i].of == m) {
            close_context(&life.contexts[i]);
        }
    }
    unload(m);
    return true;
}

/* -- contexts ------------------------------------------------------------------------------------------------------ */

static bool owns_buffers(const model * m) { return m->claims & (TILES | FROM_FILE); }

static struct llama_context_params any_params(void) {
    struct llama_context_params params = llama_context_default_params();
    const bool                  is_fa  = one_in(2);
    params.n_ctx                       = N_CTX;
    params.n_batch                     = MAX_BATCH;
    params.n_ubatch                    = one_in(2) ? MAX_BATCH : 16;
    params.n_seq_max                   = N_SEQ;
    params.n_threads                   = 1 + (int32_t) rnd_below(N_THREADS);
    params.n_threads_batch             = 1 + (int32_t) rnd_below(N_THREADS);
    params.flash_attn_type             = is_fa ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k                      = one_in(2) ? GGML_TYPE_F16 : GGML_TYPE_Q8_0;
    params.type_v                      = is_fa ? params.type_k : GGML_TYPE_F16;
    params.kv_unified                  = one_in(2);
    return params;
}

static struct llama_context * create(const model * m, struct llama_context_params params, llmaas_engine ** engine) {
    llmaas_create_begin(m->weights);
    struct llama_context * made = llama_init_from_model(m->llama, params);
    *engine                     = llmaas_create_end();
    CHECK((made != NULL) == (*engine != NULL));
    return made;
}

static bool do_open(void) {
    const model * m = any_model(true);
    context *     c = any_context(false);
    if (!m || !c) {
        return false;
    }
    *c = (context){.of = m, .params = any_params()};
    if (owns_buffers(m) || !one_in(4)) {
        c->llama = create(m, c->params, &c->engine);
        CHECK(llmaas_engine_level(c->engine) == 0);
    } else {
        c->llama = llama_init_from_model(m->llama, c->params);
    }
    CHECK(c->llama);
    if (c->engine && m->weights && llmaas_weights_problem(m->weights, true)) {
        life.n_refused++;
        close_context(c);
    } else if (one_in(3)) {
        llama_attach_threadpool(c->llama, life.pool, life.pool);
    }
    return true;
}

/* A context that llama.cpp refuses leaves no engine behind. */
static bool do_open_in_vain(void) {
    const model * m = any_model(true);
    if (!m) {
        return false;
    }
    struct llama_context_params params = any_params();
    params.flash_attn_type             = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_v                      = GGML_TYPE_Q8_0;
    llmaas_engine * engine;
    CHECK(!create(m, params, &engine));
    return true;
}

static void listen_to_density(context * c, bool is_on) {
    if (is_on && !c->density) {
        c->density           = llmaas_density_new(N_CTX, 2, 1 + rnd_below(3), 1 + rnd_below(2));
        const llmaas_tap tap = llmaas_density_tap(c->density);
        CHECK(llmaas_engine_subscribe(c->engine, &tap) == LLMAAS_OK);
    } else if (!is_on && c->density) {
        CHECK(llmaas_engine_unsubscribe(c->engine, c->density) == LLMAAS_OK);
        CHECK(llmaas_engine_unsubscribe(c->engine, c->density) == LLMAAS_EINVAL);
        llmaas_density_free(c->density);
        c->density = NULL;
    }
}

static void listen_to_states(context * c, bool is_on) {
    if (is_on && !c->states) {
        const llmaas_tap_kind kind = one_in(2) ? LLMAAS_TAP_FFN_INPUT : LLMAAS_TAP_FINAL_NORM;
        c->states                  = llmaas_states_new(kind, (int) rnd_below(2), N_EMBD, 1 + rnd_below(100));
        const llmaas_tap tap       = llmaas_states_tap(c->states);
        CHECK(llmaas_engine_subscribe(c->engine, &tap) == LLMAAS_OK);
    } else if (!is_on && c->states) {
        CHECK(llmaas_engine_unsubscribe(c->engine, c->states) == LLMAAS_OK);
        llmaas_states_free(c->states);
        c->states = NULL;
    }
}

static void close_context(context * c) {
    if (c->engine && one_in(2)) {
        listen_to_density(c, false);
        listen_to_states(c, false);
    }
    llama_free(c->llama); /* with its subscriptions */
    llmaas_density_free(c->density);
    llmaas_states_free(c->states);
    *c = (context){0};
}

static bool do_close(void) {
    context * c = any_context(true);
    if (c) {
        close_context(c);
    }
    return c != NULL;
}

/* -- decoding ------------------------------------------------------------------------------------------------------ */

/* Fill the batch with n tokens that follow those of `seq`; every one has logits, or the last. */
static void fill_batch(int n, llama_seq_id seq, int n_past, bool has_all_logits) {
    life.batch.n_tokens = n;
    for (int i = 0; i < n; ++i) {
        life.batch.token[i]     = (llama_token) rnd_below(4000);
        life.batch.pos[i]       = n_past + i;
        life.batch.n_seq_id[i]  = 1;
        life.batch.seq_id[i][0] = seq;
        life.batch.logits[i]    = has_all_logits || i == n - 1;
    }
}

static bool is_narrow(const context * c) { return c->of->claims & PART && c->level >= 1; }

/* The counters say what became of the graphs since the last look. */
static void check_stats(context * c) {
    if (!c->engine) {
        return;
    }
    llmaas_engine_stats now;
    llmaas_engine_read_stats(c->engine, &now);
    const bool has_taps   = c->density || c->states;
    const bool is_changed = is_narrow(c) || owns_buffers(c->of);
    CHECK(now.n_graphs > c->stats.n_graphs);
    CHECK(now.n_passed - c->stats.n_passed == (has_taps || is_changed ? 0 : now.n_graphs - c->stats.n_graphs));
    CHECK((now.n_taps > c->stats.n_taps) == has_taps);
    CHECK((now.n_products > c->stats.n_products) == is_changed);
    c->stats = now;
}

static bool do_decode(void) {
    context * c = any_context(true);
    if (!c) {
        return false;
    }
    const llama_seq_id seq = (llama_seq_id) rnd_below(N_SEQ);
    const int          n   = one_in(2) ? 1 : 1 + (int) rnd_below(MAX_BATCH);
    if (c->n_past[seq] + n > N_CTX / N_SEQ) {
        return false;
    }
    fill_batch(n, seq, c->n_past[seq], one_in(4));
    CHECK(llama_decode(c->llama, life.batch) == 0);
    c->n_past[seq] += n;
    const float * logits = llama_get_logits_ith(c->llama, -1);
    for (int i = 0; i < 4000; ++i) {
        CHECK(isfinite(logits[i]));
    }
    check_stats(c);
    return true;
}

static bool stop_computing(void * user) { return --*(int *) user < 0; }

static void forget_all(context * c) {
    llama_memory_clear(llama_get_memory(c->llama), one_in(2));
    memset(c->n_past, 0, sizeof c->n_past);
}

static bool do_abort(void) {
    context * c = any_context(true);
    if (!c) {
        return false;
    }
    int n_left = (int) rnd_below(60);
    forget_all(c);
    llama_set_abort_callback(c->llama, stop_computing, &n_left);
    fill_batch(1 + (int) rnd_below(MAX_BATCH), 0, 0, false);
    const int32_t code = llama_decode(c->llama, life.batch);
    CHECK(code == 0 || (code == 2 && n_left < 0));
    life.n_aborted += code == 2;
    llama_set_abort_callback(c->llama, NULL, NULL);
    forget_all(c);
    if (c->engine) {
        llmaas_engine_read_stats(c->engine, &c->stats);
    }
    return true;
}

static bool do_reset(void) {
    context * c = any_context(true);
    if (c && one_in(2)) {
        forget_all(c);
    } else if (c) {
        const llama_seq_id seq = (llama_seq_id) rnd_below(N_SEQ);
        c->n_past[seq]         = (int) rnd_below((uint32_t) c->n_past[seq] + 1);
        CHECK(llama_memory_seq_rm(llama_get_memory(c->llama), seq, c->n_past[seq], -1));
    }
    return c != NULL;
}

static bool do_restore(void) {
    context *          c   = any_context(true);
    const llama_seq_id seq = (llama_seq_id) rnd_below(N_SEQ);
    if (!c || c->n_past[seq] == 0) {
        return false;
    }
    const size_t size  = llama_state_seq_get_size(c->llama, seq);
    uint8_t *    state = exact(size);
    CHECK(llama_state_seq_get_data(c->llama, state, size, seq) == size);
    CHECK(llama_memory_seq_rm(llama_get_memory(c->llama), seq, -1, -1));
    CHECK(llama_state_seq_set_data(c->llama, state, size, seq) == size);
    free(state);
    if (c->density) {
        llmaas_density_reset(c->density);
    }
    return true;
}

static bool do_adapt(void) {
    context * c = any_context(true);
    if (!c || !c->of->adapter) {
        return false;
    }
    struct llama_adapter_lora * adapter = c->of->adapter;
    float                       scale   = 0.5f;
    c->has_adapter                      = !c->has_adapter;
    CHECK(llama_set_adapters_lora(c->llama, &adapter, c->has_adapter, &scale) == 0);
    return true;
}

/* -- levels and taps ----------------------------------------------------------------------------------------------- */

static bool do_switch(void) {
    context * c = any_engine();
    if (c) {
        c->level = (int32_t) rnd_below(6) - 1;
        llmaas_engine_set_level(c->engine, c->level);
        CHECK(llmaas_engine_level(c->engine) == c->level);
    }
    return c != NULL;
}

static bool do_listen(void) {
    context * c = any_engine();
    if (c && one_in(2)) {
        listen_to_density(c, !c->density);
    } else if (c) {
        listen_to_states(c, !c->states);
    }
    return c != NULL;
}

static void read_density(context * c) {
    double   sums[N_CTX];
    uint64_t counts[N_CTX];
    CHECK(llmaas_density_read(c->density, N_CTX, sums, counts) == LLMAAS_OK);
    for (int i = 0; i < N_CTX; ++i) {
        CHECK(sums[i] >= 0.0 && sums[i] <= (double) counts[i] * 1.001);
    }
}

static void read_states(context * c) {
    float    rows[20 * N_EMBD];
    uint32_t n_taken;
    uint64_t n_lost;
    CHECK(llmaas_states_take(c->states, 20, rows, &n_taken, &n_lost) == LLMAAS_OK);
    for (uint32_t i = 0; i < n_taken * N_EMBD; ++i) {
        CHECK(isfinite(rows[i]));
    }
}

static bool do_read(void) {
    context * c = any_engine();
    if (c && c->density) {
        read_density(c);
    }
    if (c && c->states) {
        read_states(c);
    }
    return c && (c->density || c->states);
}

/* -- against vanilla ----------------------------------------------------------------------------------------------- */

/* Whether products are the same bits as vanilla's: those of several tiles are added in another order. */
static bool is_exact(const context * c) { return (c->of->claims & (TILES | PART)) != (TILES | PART); }

static void compare_logits(const context * c, struct llama_context * vanilla, int n) {
    for (int i = 0; i < n; ++i) {
        const float * found    = llama_get_logits_ith(c->llama, i);
        const float * expected = llama_get_logits_ith(vanilla, i);
        CHECK(memcmp(found, expected, sizeof(float) * 4000) == 0);
    }
}

/* The same batches from the start, in this context and in a vanilla one of the same file. */
static bool do_compare(void) {
    context * c = any_context(true);
    if (!c || !is_exact(c)) {
        return false;
    }
    if (c->engine && is_narrow(c)) {
        llmaas_engine_set_level(c->engine, c->level = one_in(2) ? 0 : -1);
    }
    model reference = {.path = c->of->path, .is_repacked = c->of->is_repacked};
    CHECK(load(&reference, false));
    struct llama_context * vanilla = llama_init_from_model(reference.llama, c->params);
    CHECK(vanilla);
    float scale = 0.5f;
    CHECK(llama_set_adapters_lora(vanilla, &reference.adapter, c->has_adapter, &scale) == 0);
    forget_all(c);
    for (int i = 0; i < 3; ++i) {
        const int n = i < 2 ? 1 + (int) rnd_below(60) : 1;
        fill_batch(n, 0, c->n_past[0], true);
        CHECK(llama_decode(c->llama, life.batch) == 0 && llama_decode(vanilla, life.batch) == 0);
        c->n_past[0] += n;
        compare_logits(c, vanilla, n);
    }
    check_stats(c);
    llama_free(vanilla);
    unload(&reference);
    life.n_compared++;
    return true;
}

/* -- all of it ----------------------------------------------------------------------------------------------------- */

static struct operation {
    const char * name;
    bool (*run)(void); /* false: not possible now */
    uint32_t weight;
    uint64_t n_done;
} operations[] = {
    {"load", do_load, 3, 0},       {"unload", do_unload, 1, 0},   {"open", do_open, 5, 0},
    {"vain", do_open_in_vain, 1, 0}, {"close", do_close, 3, 0},   {"decode", do_decode, 30, 0},
    {"reset", do_reset, 10, 0},    {"restore", do_restore, 4, 0}, {"adapt", do_adapt, 4, 0},
    {"switch", do_switch, 10, 0},  {"listen", do_listen, 10, 0},  {"read", do_read, 10, 0},
    {"abort", do_abort, 3, 0},     {"compare", do_compare, 2, 0},
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

/* The backend is registered exactly while there are engines. */
static void check_registration(void) {
    uint32_t n_engines = 0;
    for (int i = 0; i < MAX_CONTEXTS; ++i) {
        n_engines += life.contexts[i].engine != NULL;
    }
    CHECK(llmaas_engine_count() == n_engines);
    CHECK(llmaas_backend_registered() == (n_engines > 0));
}

static void finish(void) {
    while (do_unload()) {
        check_registration();
    }
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
