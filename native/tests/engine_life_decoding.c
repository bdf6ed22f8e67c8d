/* Decoding, operations between two batches, and comparison of the results with a vanilla context. */
#include "engine_life.h"

#include <math.h>

/* Fill the batch with n tokens that follow those of `seq`; all of them have logits, or only the last. */
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

/* Check the counters of graphs since the last check. */
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

bool do_decode(void) {
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

bool do_abort(void) {
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

bool do_reset(void) {
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

bool do_restore(void) {
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

bool do_adapt(void) {
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

/* -- comparison with vanilla --------------------------------------------------------------------------------------- */

/* Return whether products should be bit-identical to vanilla's: those of several tiles are added in another order. */
static bool is_exact(const context * c) {
    return (c->of->claims & (TILES | PART)) != (TILES | PART) && !(c->of->claims & CHANNELS);
}

static void compare_logits(const context * c, struct llama_context * vanilla, int n) {
    for (int i = 0; i < n; ++i) {
        const float * found    = llama_get_logits_ith(c->llama, i);
        const float * expected = llama_get_logits_ith(vanilla, i);
        CHECK(memcmp(found, expected, sizeof(float) * 4000) == 0);
    }
}

/* Run the same batches from the start, in this context and in a vanilla one of the same file. */
bool do_compare(void) {
    context * c = any_context(true);
    if (!c || !is_exact(c)) {
        return false;
    }
    if (c->engine && is_narrow(c)) {
        llmaas_engine_set_level(c->engine, c->level = one_in(2) ? 0 : -1);
    }
    model reference = {.path = c->of->path, .is_repacked = c->of->is_repacked};
    CHECK(load_model(&reference, false));
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
    unload_model(&reference);
    life.n_compared++;
    return true;
}
