/* Hidden states: a ring of rows. Thread 0 alone copies a node's rows, under the lock that take() holds, so they arrive
 * in order and complete. 512 rows of 2048 floats take 0.2 ms. */
#include "base/fork_lock.h"
#include "base/rows.h"
#include "llmaas/tap.h"

#include <stdlib.h>
#include <string.h>

struct llmaas_hidden_states {
    llmaas_tap_kind kind;
    int             layer;
    uint32_t        n_embd;
    uint32_t        capacity;
    llmaas_fork_lock lock; /* between run() and take(); guards the members below */
    uint64_t        n_put;  /* rows ever put in: row i lies in slot i % capacity */
    uint64_t        n_gone; /* rows of n_put that were taken or lost */
    uint64_t        n_lost; /* rows lost since the last take() */
    float           rows[];
};

static float * slot(llmaas_hidden_states * states, uint64_t i) {
    return states->rows + (i % states->capacity) * states->n_embd;
}

llmaas_hidden_states * llmaas_hidden_states_new(llmaas_tap_kind kind, int layer, uint32_t n_embd, uint32_t capacity) {
    const bool   is_state = kind == LLMAAS_TAP_FFN_INPUT || kind == LLMAAS_TAP_FINAL_NORM;
    const size_t limit    = (SIZE_MAX - sizeof(llmaas_hidden_states)) / sizeof(float);
    if (!is_state || !n_embd || !capacity || capacity > limit / n_embd) {
        return NULL;
    }
    llmaas_hidden_states * states = malloc(sizeof *states + sizeof(float) * n_embd * capacity);
    if (!states) {
        return NULL;
    }
    *states = (llmaas_hidden_states){.kind = kind, .layer = layer, .n_embd = n_embd, .capacity = capacity};
    if (!llmaas_fork_lock_init(&states->lock, NULL)) {
        free(states);
        return NULL;
    }
    return states;
}

void llmaas_hidden_states_free(llmaas_hidden_states * states) {
    if (states) {
        llmaas_fork_lock_destroy(&states->lock);
        free(states);
    }
}

static bool wants(void * user, int layer) {
    const llmaas_hidden_states * states = user;
    return states->kind == LLMAAS_TAP_FINAL_NORM || layer == states->layer;
}

static void put(llmaas_hidden_states * states, const struct ggml_tensor * from) {
    const int64_t n_rows = ggml_nrows(from);
    if (from->type != GGML_TYPE_F32 || from->ne[0] != states->n_embd || from->nb[0] != sizeof(float)) {
        states->n_lost += (uint64_t) n_rows;
        return;
    }
    const int64_t n_skipped = n_rows > states->capacity ? n_rows - states->capacity : 0;
    for (int64_t row = n_skipped; row < n_rows; ++row) {
        memcpy(slot(states, states->n_put + (uint64_t) row), llmaas_row(from, row), sizeof(float) * states->n_embd);
    }
    states->n_put += (uint64_t) n_rows;
    if (states->n_put - states->n_gone > states->capacity) {
        states->n_lost += states->n_put - states->n_gone - states->capacity;
        states->n_gone = states->n_put - states->capacity;
    }
}

static void run(void * user, const llmaas_tap_view * view, int ith, int nth) {
    (void) nth;
    llmaas_hidden_states * states = user;
    if (ith == 0) {
        pthread_mutex_lock(&states->lock.mutex);
        put(states, view->states);
        pthread_mutex_unlock(&states->lock.mutex);
    }
}

llmaas_tap llmaas_hidden_states_tap(llmaas_hidden_states * states) {
    return (llmaas_tap){.kind = states->kind, .user = states, .wants = wants, .run = run};
}

llmaas_status llmaas_hidden_states_take(
    llmaas_hidden_states * states, uint32_t n, float * rows, uint32_t * n_taken, uint64_t * n_lost) {
    if (!states || !n_taken || !n_lost || (n && !rows)) {
        return LLMAAS_EINVAL;
    }
    pthread_mutex_lock(&states->lock.mutex);
    const uint64_t n_held = states->n_put - states->n_gone;
    *n_taken              = n_held < n ? (uint32_t) n_held : n;
    for (uint32_t i = 0; i < *n_taken; ++i) {
        memcpy(rows + (size_t) i * states->n_embd, slot(states, states->n_gone + i), sizeof(float) * states->n_embd);
    }
    states->n_gone += *n_taken;
    *n_lost        = states->n_lost;
    states->n_lost = 0;
    pthread_mutex_unlock(&states->lock.mutex);
    return LLMAAS_OK;
}
