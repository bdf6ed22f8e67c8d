/* Locks across forks: data that another thread changes for a moment is complete, and its lock free, in a child. No
 * child allocates memory, since other threads may hold locks of AddressSanitizer's allocator. */
#include "check.h"

#include "llmaas/tap.h"
#include "weights/weights.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

enum { N_FORKS = 30, HANGS_AFTER_S = 10, N = 20000, N_TABLES = 2000 };

/* Work that a thread repeats, and that each child does once. */
typedef struct work {
    void (*run)(void * of);
    void *      of;
    atomic_bool is_over;
} work;

static void * go_on(void * arg) {
    work * w = arg;
    while (!w->is_over) {
        w->run(w->of);
    }
    return NULL;
}

static void check_child(void (*run)(void *), void * of) {
    int         status;
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(HANGS_AFTER_S);
        run(of);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void check_children(void (*run)(void *), void * of) {
    work      w = {.run = run, .of = of};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, go_on, &w) == 0);
    for (int i = 0; i < N_FORKS; ++i) {
        check_child(run, of);
    }
    w.is_over = true;
    CHECK(pthread_join(thread, NULL) == 0);
}

/* -- taps ----------------------------------------------------------------------------------------------------------- */

static _Thread_local double   sums[N];
static _Thread_local uint64_t counts[N];
static _Thread_local float    taken[N];

static void read_density(void * density) { CHECK(llmaas_density_read(density, N, sums, counts) == LLMAAS_OK); }

static void read_magnitudes(void * magnitudes) {
    CHECK(llmaas_magnitudes_read(magnitudes, 0, counts, sums) == LLMAAS_OK);
}

struct put {
    llmaas_hidden_states *            states;
    const struct ggml_tensor * row;
};

static void put_and_take(void * of) {
    const struct put * put = of;
    const llmaas_tap   tap = llmaas_hidden_states_tap(put->states);
    uint32_t           n_taken;
    uint64_t           n_lost;
    tap.run(tap.user, &(llmaas_tap_view) {.kind = LLMAAS_TAP_FINAL_NORM, .layer = -1, .states = put->row}, 0, 1);
    CHECK(llmaas_hidden_states_take(put->states, 1, taken, &n_taken, &n_lost) == LLMAAS_OK);
}

static void test_a_child_uses_taps_that_another_thread_uses(void) {
    const uint32_t        n_channels = N;
    llmaas_density *      density    = llmaas_density_new(N, 1, 1, 1);
    llmaas_magnitudes *   magnitudes = llmaas_magnitudes_new(LLMAAS_TAP_FFN_MIDDLE, 1, &n_channels);
    llmaas_hidden_states *       states     = llmaas_hidden_states_new(LLMAAS_TAP_FINAL_NORM, 0, N, 4);
    struct ggml_context * ctx        = ggml_init((struct ggml_init_params) {.mem_size = 1u << 20});
    CHECK(density && magnitudes && states && ctx);
    struct put put = {states, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, N, 1)};
    check_children(read_density, density);
    check_children(read_magnitudes, magnitudes);
    check_children(put_and_take, &put);
    llmaas_density_free(density);
    llmaas_magnitudes_free(magnitudes);
    llmaas_hidden_states_free(states);
    ggml_free(ctx);
}

/* -- weights -------------------------------------------------------------------------------------------------------- */

static llmaas_weights * tables[N_TABLES];

static void * claim_all(void * arg) {
    (void) arg;
    for (int i = 0; i < N_TABLES; ++i) { /* the first claim of a file makes a stream and its lock */
        CHECK(llmaas_weights_claim_file(tables[i], "blk.0.ffn_up.weight", "/proc/self/exe", 0, false) == LLMAAS_OK);
    }
    return NULL;
}

static void use_all(void * arg) {
    (void) arg;
    for (int i = 0; i < N_TABLES; ++i) {
        CHECK(!llmaas_weights_are_void(tables[i]));
        CHECK(llmaas_weights_set_part(tables[i], "another", &(int64_t) {1}, 1) == LLMAAS_EINVAL);
    }
}

static void test_a_child_has_all_or_nothing_of_a_change(void) {
    pthread_t thread;
    for (int i = 0; i < N_TABLES; ++i) {
        tables[i] = llmaas_weights_new();
        CHECK(tables[i]);
    }
    CHECK(pthread_create(&thread, NULL, claim_all, NULL) == 0);
    for (int i = 0; i < N_FORKS; ++i) {
        check_child(use_all, NULL);
    }
    CHECK(pthread_join(thread, NULL) == 0);
    for (int i = 0; i < N_TABLES; ++i) {
        llmaas_weights_release(tables[i]);
    }
}

int main(void) {
    test_a_child_uses_taps_that_another_thread_uses();
    test_a_child_has_all_or_nothing_of_a_change();
    return 0;
}
