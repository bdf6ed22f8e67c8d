/* The tap that captures hidden states: a ring of rows. */
#include "tap_threads.h"

enum { N_EMBD = 24 };

/* Make rows of equal floats: first, first + 1, ... */
static struct ggml_tensor * numbered_rows(struct ggml_context * ctx, int n_embd, int n_rows, int first) {
    struct ggml_tensor * rows = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_embd, n_rows);
    for (int i = 0; i < n_embd * n_rows; ++i) {
        ((float *) rows->data)[i] = (float) (first + i / n_embd);
    }
    return rows;
}

static void put_rows(llmaas_hidden_states * states, const struct ggml_tensor * rows) {
    const llmaas_tap_view view = {.kind = LLMAAS_TAP_FINAL_NORM, .layer = -1, .is_first = true, .states = rows};
    run_tap(llmaas_hidden_states_tap(states), &view, 1, 3);
}

/* Take at most n rows; check that they are first, first + 1, ... */
static void check_taken(llmaas_hidden_states * states, uint32_t n, uint32_t n_expected, int first, uint64_t n_lost_expected) {
    float *  rows = (float *) (void *) exact(sizeof(float) * N_EMBD * n);
    uint32_t n_taken;
    uint64_t n_lost;
    CHECK(llmaas_hidden_states_take(states, n, rows, &n_taken, &n_lost) == LLMAAS_OK);
    CHECK(n_taken == n_expected && n_lost == n_lost_expected);
    for (uint32_t i = 0; i < n_taken * N_EMBD; ++i) {
        CHECK(rows[i] == (float) (first + (int) (i / N_EMBD)));
    }
    free(rows);
}

static void test_states_come_out_in_order(void) {
    struct ggml_context * ctx    = context_new();
    llmaas_hidden_states *       states = llmaas_hidden_states_new(LLMAAS_TAP_FINAL_NORM, 0, N_EMBD, 10);
    check_taken(states, 5, 0, 0, 0);
    put_rows(states, numbered_rows(ctx, N_EMBD, 4, 0));
    put_rows(states, numbered_rows(ctx, N_EMBD, 3, 4));
    check_taken(states, 5, 5, 0, 0);
    put_rows(states, numbered_rows(ctx, N_EMBD, 8, 7)); /* across the ring's end */
    check_taken(states, 20, 10, 5, 0);
    llmaas_hidden_states_free(states);
    ggml_free(ctx);
}

static void test_a_full_ring_loses_the_oldest_states(void) {
    struct ggml_context * ctx    = context_new();
    llmaas_hidden_states *       states = llmaas_hidden_states_new(LLMAAS_TAP_FINAL_NORM, 0, N_EMBD, 10);
    put_rows(states, numbered_rows(ctx, N_EMBD, 7, 0));
    put_rows(states, numbered_rows(ctx, N_EMBD, 7, 7));
    check_taken(states, 1, 1, 4, 4);
    put_rows(states, numbered_rows(ctx, N_EMBD, 25, 14)); /* more than it holds */
    check_taken(states, 20, 10, 29, 24);
    check_taken(states, 20, 0, 0, 0);
    put_rows(states, numbered_rows(ctx, N_EMBD + 1, 2, 0)); /* wrong width */
    check_taken(states, 20, 0, 0, 2);
    llmaas_hidden_states_free(states);
    ggml_free(ctx);
}

static void test_states_may_be_strided(void) {
    struct ggml_context * ctx    = context_new();
    llmaas_hidden_states *       states = llmaas_hidden_states_new(LLMAAS_TAP_FFN_INPUT, 2, N_EMBD, 10);
    struct ggml_tensor *  all    = numbered_rows(ctx, N_EMBD, 6, 0);
    put_rows(states, ggml_view_3d(ctx, all, N_EMBD, 1, 3, all->nb[1], 2 * all->nb[1], all->nb[1])); /* 1, 3, 5 */
    check_taken(states, 1, 1, 1, 0);
    check_taken(states, 1, 1, 3, 0);
    check_taken(states, 1, 1, 5, 0);
    llmaas_hidden_states_free(states);
    ggml_free(ctx);
}

typedef struct producer {
    llmaas_hidden_states * states;
    int             n_rows;
} producer;

static void * keep_putting(void * arg) {
    const producer *      p   = arg;
    struct ggml_context * ctx = context_new();
    llmaas_tap_view       views[200];
    for (int i = 0; i < 200; ++i) {
        struct ggml_tensor * rows = numbered_rows(ctx, N_EMBD, p->n_rows, i * p->n_rows);
        views[i] = (llmaas_tap_view){.kind = LLMAAS_TAP_FINAL_NORM, .layer = -1, .is_first = true, .states = rows};
    }
    run_tap(llmaas_hidden_states_tap(p->states), views, 200, 2);
    ggml_free(ctx);
    return NULL;
}

static void test_states_taken_while_graphs_run_are_whole(void) {
    producer  p = {.states = llmaas_hidden_states_new(LLMAAS_TAP_FINAL_NORM, 0, N_EMBD, 16), .n_rows = 5};
    pthread_t thread;
    uint64_t  n_seen = 0;
    CHECK(pthread_create(&thread, NULL, keep_putting, &p) == 0);
    while (n_seen < 1000) {
        float    rows[7 * N_EMBD];
        uint32_t n_taken;
        uint64_t n_lost;
        CHECK(llmaas_hidden_states_take(p.states, 7, rows, &n_taken, &n_lost) == LLMAAS_OK);
        n_seen += n_lost;
        for (uint32_t i = 0; i < n_taken * N_EMBD; ++i) {
            CHECK(rows[i] == (float) (n_seen + i / N_EMBD));
        }
        n_seen += n_taken;
    }
    CHECK(n_seen == 1000);
    CHECK(pthread_join(thread, NULL) == 0);
    llmaas_hidden_states_free(p.states);
}

static void test_states_arguments(void) {
    CHECK(!llmaas_hidden_states_new(LLMAAS_TAP_ATTENTION, 0, N_EMBD, 4));
    CHECK(!llmaas_hidden_states_new(LLMAAS_TAP_FINAL_NORM, 0, 0, 4));
    CHECK(!llmaas_hidden_states_new(LLMAAS_TAP_FINAL_NORM, 0, N_EMBD, 0));
    llmaas_hidden_states *  states = llmaas_hidden_states_new(LLMAAS_TAP_FFN_INPUT, 2, N_EMBD, 4);
    const llmaas_tap tap    = llmaas_hidden_states_tap(states);
    CHECK(tap.kind == LLMAAS_TAP_FFN_INPUT && tap.wants(tap.user, 2) && !tap.wants(tap.user, 1));
    uint32_t n_taken;
    uint64_t n_lost;
    CHECK(llmaas_hidden_states_take(states, 1, NULL, &n_taken, &n_lost) == LLMAAS_EINVAL);
    llmaas_hidden_states_free(states);
    llmaas_hidden_states_free(NULL);
}

int main(void) {
    test_states_come_out_in_order();
    test_a_full_ring_loses_the_oldest_states();
    test_states_may_be_strided();
    test_states_taken_while_graphs_run_are_whole();
    test_states_arguments();
    return 0;
}
