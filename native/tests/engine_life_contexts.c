/* Contexts, their levels and taps. */
#include "engine_life.h"

#include <math.h>

static context * any_engine(void) {
    context * c = any_context(true);
    return c && c->engine ? c : NULL;
}

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

bool do_open(void) {
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

/* Check that a context that llama.cpp refuses leaves no engine behind. */
bool do_open_in_vain(void) {
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
        c->states                  = llmaas_hidden_states_new(kind, (int) rnd_below(2), N_EMBD, 1 + rnd_below(100));
        const llmaas_tap tap       = llmaas_hidden_states_tap(c->states);
        CHECK(llmaas_engine_subscribe(c->engine, &tap) == LLMAAS_OK);
    } else if (!is_on && c->states) {
        CHECK(llmaas_engine_unsubscribe(c->engine, c->states) == LLMAAS_OK);
        llmaas_hidden_states_free(c->states);
        c->states = NULL;
    }
}

void close_context(context * c) {
    if (c->engine && one_in(2)) {
        listen_to_density(c, false);
        listen_to_states(c, false);
    }
    llama_free(c->llama); /* also ends its subscriptions */
    llmaas_density_free(c->density);
    llmaas_hidden_states_free(c->states);
    *c = (context){0};
}

bool do_close(void) {
    context * c = any_context(true);
    if (c) {
        close_context(c);
    }
    return c != NULL;
}

/* -- levels and taps ----------------------------------------------------------------------------------------------- */

bool do_switch(void) {
    context * c = any_engine();
    if (c) {
        c->level = (int32_t) rnd_below(6) - 1;
        llmaas_engine_set_level(c->engine, c->level);
        CHECK(llmaas_engine_level(c->engine) == c->level);
    }
    return c != NULL;
}

bool do_listen(void) {
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
    CHECK(llmaas_hidden_states_take(c->states, 20, rows, &n_taken, &n_lost) == LLMAAS_OK);
    for (uint32_t i = 0; i < n_taken * N_EMBD; ++i) {
        CHECK(isfinite(rows[i]));
    }
}

bool do_read(void) {
    context * c = any_engine();
    if (c && c->density) {
        read_density(c);
    }
    if (c && c->states) {
        read_states(c);
    }
    return c && (c->density || c->states);
}
