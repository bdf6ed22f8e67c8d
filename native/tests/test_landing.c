/* Where the pieces of a blob belong, as reported by a reader that hands them out like llama.cpp's. */
#include "attention/cells.h"
#include "check.h"

#include "ggml-alloc.h"

#include <pthread.h>

enum {
    N_CELLS   = 64,
    N_EMBD    = 8,
    ROW_BYTES = 2 * N_EMBD,
    N_LAYER   = 2,
    N_TENSORS = 2 * N_LAYER,
    HEAD      = 12, /* bytes before each tensor's data in a blob */
    N_BYTES   = N_TENSORS * N_CELLS * ROW_BYTES,
};

typedef struct run {
    uint32_t start, end;
} run;

/* A context: its cells in a buffer, and how the reader should behave. */
typedef struct engine {
    struct ggml_context * ctx;
    struct ggml_tensor *  tensors[N_TENSORS]; /* K of all layers, then V */
    ggml_backend_buffer_t buffer;
    llmaas_cells          cells;
    bool                  is_transposed;
    run                   runs[3]; /* the free cells, in order */
    run                   last[3]; /* where the reader puts the last tensor's pieces, if elsewhere */
    uint32_t              n_loaded;     /* tensors that the reader hands out */
    bool                  is_backwards; /* the last tensor's bytes come first */
    bool                  refuses;
    pthread_barrier_t *   meeting; /* with another reader; NULL: alone */
    uint32_t              n_calls;
    int32_t               sequence;
} engine;

static struct ggml_tensor * tensor_new(struct ggml_context * ctx, struct ggml_tallocr * place) {
    struct ggml_tensor * made = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, N_EMBD, N_CELLS);
    CHECK(ggml_tallocr_alloc(place, made) == GGML_STATUS_SUCCESS);
    return made;
}

/* Make an engine; every byte of its cells is 7. */
static engine engine_new(bool is_transposed) {
    engine e = {.is_transposed = is_transposed, .n_loaded = N_TENSORS, .sequence = -1};
    e.ctx    = ggml_init((struct ggml_init_params) {.mem_size = 1 << 16, .no_alloc = true});
    e.buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), 2 * N_BYTES);
    e.cells  = (llmaas_cells) {.buffer = e.buffer, .is_whole = true, .n_cells = N_CELLS};
    struct ggml_tallocr place = ggml_tallocr_new(e.buffer);
    for (uint32_t i = 0; i < N_TENSORS; ++i) {
        e.tensors[i] = tensor_new(e.ctx, &place);
    }
    ggml_backend_buffer_clear(e.buffer, 7);
    return e;
}

static void engine_free(engine * e) {
    ggml_backend_buffer_free(e->buffer);
    ggml_free(e->ctx);
}

static uint32_t n_free(const engine * e) {
    uint32_t n = 0;
    for (size_t i = 0; i < sizeof e->runs / sizeof *e->runs; ++i) {
        n += e->runs[i].end - e->runs[i].start;
    }
    return n;
}

static size_t blob_bytes(const engine * e) { return HEAD + N_TENSORS * (HEAD + (size_t) n_free(e) * ROW_BYTES); }

static uint8_t * blob_new(const engine * e) {
    uint8_t * blob = exact(blob_bytes(e));
    fill_random(blob, blob_bytes(e));
    return blob;
}

/* Hand out a tensor's pieces. Return the blob position behind them. */
static const uint8_t * load(const run * runs, struct ggml_tensor * tensor, bool is_transposed, const uint8_t * from) {
    const uint32_t n_channels = is_transposed ? N_EMBD : 1;
    const size_t   cell       = ROW_BYTES / n_channels;
    for (uint32_t channel = 0; channel < n_channels; ++channel) {
        for (size_t i = 0; i < 3; ++i) {
            const size_t n = (runs[i].end - runs[i].start) * cell;
            ggml_backend_tensor_set(tensor, from, (runs[i].start + (size_t) channel * N_CELLS) * cell, n);
            from += n;
        }
    }
    return from;
}

/* Stand in for llama_state_seq_set_data: label cells, then set the tensors; a reader that refuses halfway leaves
 * zeros. */
static size_t set_data(void * ctx, const uint8_t * blob, size_t n_bytes, int32_t sequence) {
    engine *        e    = ctx;
    const uint8_t * from = blob + HEAD;
    e->n_calls++;
    e->sequence = sequence;
    if (e->meeting) {
        pthread_barrier_wait(e->meeting);
    }
    if (e->refuses) {
        static const uint8_t zeros[N_CELLS * ROW_BYTES];
        ggml_backend_tensor_set(e->tensors[0], zeros, 0, sizeof zeros);
        return 0;
    }
    for (uint32_t i = 0; i < e->n_loaded; ++i) {
        from = e->is_backwards ? blob + n_bytes - (i + 1) * (n_bytes - HEAD) / N_TENSORS : from;
        const run * runs = i == N_TENSORS - 1 && e->last[0].end ? e->last : e->runs;
        from = load(runs, e->tensors[i], e->is_transposed && i >= N_LAYER, from + HEAD);
    }
    if (e->meeting) {
        pthread_barrier_wait(e->meeting);
    }
    CHECK(e->n_loaded < N_TENSORS || e->is_backwards || from == blob + n_bytes);
    return e->is_backwards ? n_bytes : (size_t) (from - blob);
}

static llmaas_status land(engine * e, const uint8_t * blob, llmaas_landing * landings, uint32_t n) {
    return llmaas_cells_land(&e->cells, set_data, e, 5, blob, blob_bytes(e), landings, n);
}

static const uint8_t * bytes_of(const engine * e) { return ggml_backend_buffer_get_base(e->buffer); }

static void check_untouched(const engine * e) {
    for (size_t i = 0; i < N_BYTES; ++i) {
        CHECK(bytes_of(e)[i] == 7);
    }
}

/* Check that the buffer takes data as before. */
static void check_restored(engine * e) {
    const uint8_t some[ROW_BYTES] = {1, 2, 3};
    ggml_backend_tensor_set(e->tensors[1], some, ROW_BYTES, ROW_BYTES);
    CHECK(memcmp((uint8_t *) e->tensors[1]->data + ROW_BYTES, some, ROW_BYTES) == 0);
}

static void check_cells_in_a_row(bool is_transposed, run free_cells) {
    engine         direct = engine_new(is_transposed), landed = engine_new(is_transposed);
    llmaas_landing landings[N_TENSORS];
    direct.runs[0] = landed.runs[0] = free_cells;
    uint8_t * blob = blob_new(&landed);
    CHECK(land(&landed, blob, landings, N_TENSORS) == LLMAAS_OK);
    CHECK(landed.n_calls == 1 && landed.sequence == 5);
    check_untouched(&landed);

    const uint8_t * from = blob + HEAD;
    for (uint32_t i = 0; i < N_TENSORS; ++i) {
        const bool is_v = is_transposed && i >= N_LAYER;
        CHECK(landings[i].n_pieces == (is_v ? N_EMBD : 1) && landings[i].step == (is_v ? 2u * N_CELLS : 0));
        from += HEAD;
        for (uint64_t piece = 0; piece < landings[i].n_pieces; ++piece, from += landings[i].n_bytes) {
            memcpy(landings[i].first + piece * landings[i].step, from, landings[i].n_bytes);
        }
    }
    CHECK(from == blob + blob_bytes(&landed));
    CHECK(set_data(&direct, blob, blob_bytes(&direct), 5) == blob_bytes(&direct));
    CHECK(memcmp(bytes_of(&landed), bytes_of(&direct), N_BYTES) == 0);
    check_restored(&landed);
    free(blob);
    engine_free(&direct), engine_free(&landed);
}

static void test_places_are_where_the_reader_would_copy_to(void) {
    const run some[] = {{0, N_CELLS}, {0, 1}, {7, 40}, {N_CELLS - 1, N_CELLS}};
    for (size_t i = 0; i < sizeof some / sizeof *some; ++i) {
        check_cells_in_a_row(false, some[i]);
        check_cells_in_a_row(true, some[i]);
    }
}

static void check_refused(engine * e, uint32_t n_landings) {
    llmaas_landing landings[N_TENSORS + 1];
    uint8_t *      blob = blob_new(e);
    CHECK(land(e, blob, landings, n_landings) == LLMAAS_EUNSUPPORTED);
    CHECK(e->n_calls == 1);
    check_restored(e);
    free(blob);
    engine_free(e);
}

static void test_scattered_cells_are_refused(void) {
    static const run cases[][3] = {
        {{0, 8}, {10, 20}, {0, 0}},    {{0, 8}, {10, 18}, {0, 0}},  {{0, 1}, {2, 3}, {4, 5}},
        {{0, 16}, {32, 48}, {0, 0}}, /* half a channel apart */
        {{30, 40}, {0, 10}, {0, 0}}, /* the engine wraps around */
        {{30, 40}, {0, 12}, {0, 0}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        for (int is_transposed = 0; is_transposed < 2; ++is_transposed) {
            engine e = engine_new(is_transposed);
            memcpy(e.runs, cases[i], sizeof e.runs);
            check_refused(&e, N_TENSORS);
        }
    }
}

/* Check uneven pieces: no reader does that to contiguous cells, but one that did would be detected. */
static void test_uneven_pieces_are_refused(void) {
    static const run cases[][3] = {
        {{3, 5}, {5, 9}, {0, 0}}, {{3, 5}, {5, 7}, {8, 10}}, {{7, 9}, {5, 7}, {3, 5}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        engine e  = engine_new(false);
        e.runs[0] = (run) {3, 9};
        memcpy(e.last, cases[i], sizeof e.last);
        check_refused(&e, N_TENSORS);
    }
}

static void test_other_numbers_of_tensors_are_refused(void) {
    static const uint32_t counts[] = {0, 1, N_TENSORS - 1, N_TENSORS + 1};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; ++i) {
        engine e  = engine_new(false);
        e.runs[0] = (run) {3, 9};
        check_refused(&e, counts[i]);
    }
}

static void test_a_blob_that_was_not_read_to_its_end_is_refused(void) {
    engine e   = engine_new(false);
    e.runs[0]  = (run) {3, 9};
    e.n_loaded = N_TENSORS - 1;
    check_refused(&e, N_TENSORS - 1);
}

static void test_another_order_than_the_blobs_is_refused(void) {
    engine e       = engine_new(false);
    e.runs[0]      = (run) {3, 9};
    e.is_backwards = true;
    check_refused(&e, N_TENSORS);
}

/* Check K and V of a layer outside the context's one buffer: they are copied as usual. */
static void test_tensors_elsewhere_are_refused(void) {
    engine                e     = engine_new(false);
    ggml_backend_buffer_t other = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), N_BYTES);
    struct ggml_tallocr   place = ggml_tallocr_new(other);
    e.tensors[1] = tensor_new(e.ctx, &place);
    e.runs[0]    = (run) {3, 9};

    llmaas_landing landings[N_TENSORS];
    uint8_t *      blob = blob_new(&e);
    const size_t   n    = 6 * ROW_BYTES;
    CHECK(land(&e, blob, landings, N_TENSORS) == LLMAAS_EUNSUPPORTED);
    check_untouched(&e);
    CHECK(memcmp((uint8_t *) e.tensors[1]->data + 3 * ROW_BYTES, blob + HEAD + HEAD + n + HEAD, n) == 0);
    free(blob);
    ggml_backend_buffer_free(other);
    engine_free(&e);
}

static void test_what_is_not_the_blobs_is_copied(void) {
    engine         e = engine_new(false);
    llmaas_landing landings[N_TENSORS];
    e.runs[0] = (run) {3, 9};
    e.refuses = true;
    uint8_t * blob = blob_new(&e);
    CHECK(land(&e, blob, landings, N_TENSORS) == LLMAAS_EUNSUPPORTED);
    const uint8_t * keys = e.tensors[0]->data;
    for (size_t i = 0; i < N_CELLS * ROW_BYTES; ++i) {
        CHECK(keys[i] == 0);
    }
    check_restored(&e);
    free(blob);
    engine_free(&e);
}

static void check_not_tried(llmaas_cells cells) {
    engine         e = engine_new(false);
    llmaas_landing landings[N_TENSORS];
    e.runs[0]      = (run) {3, 9};
    uint8_t * blob = blob_new(&e);
    cells.buffer   = cells.buffer ? e.buffer : NULL;
    CHECK(llmaas_cells_land(&cells, set_data, &e, 5, blob, blob_bytes(&e), landings, N_TENSORS) == LLMAAS_EUNSUPPORTED);
    CHECK(e.n_calls == 0);
    free(blob);
    engine_free(&e);
}

static void test_cells_that_nobody_knows_are_left_alone(void) {
    engine e = engine_new(false);
    check_not_tried((llmaas_cells) {.buffer = NULL, .is_whole = true});      /* no graph was seen yet */
    check_not_tried((llmaas_cells) {.buffer = e.buffer, .is_whole = false}); /* there are two caches */
    engine_free(&e);
}

static void * land_on_a_thread(void * arg) {
    engine *       e = arg;
    llmaas_landing landings[N_TENSORS];
    uint8_t *      blob = blob_new(e);
    for (int i = 0; i < 50; ++i) {
        CHECK(land(e, blob, landings, N_TENSORS) == LLMAAS_OK);
        CHECK(landings[0].first == (uint8_t *) e->tensors[0]->data + e->runs[0].start * ROW_BYTES);
        CHECK(landings[N_TENSORS - 1].first == (uint8_t *) e->tensors[N_TENSORS - 1]->data + 2 * e->runs[0].start);
    }
    free(blob);
    return NULL;
}

static void test_two_contexts_at_the_same_time(void) {
    pthread_barrier_t meeting;
    pthread_t         threads[2];
    engine            engines[2] = {engine_new(true), engine_new(true)};
    CHECK(pthread_barrier_init(&meeting, NULL, 2) == 0);
    for (uint32_t i = 0; i < 2; ++i) {
        engines[i].runs[0] = (run) {3 + i, 20 + i};
        engines[i].meeting = &meeting;
        CHECK(pthread_create(&threads[i], NULL, land_on_a_thread, &engines[i]) == 0);
    }
    for (uint32_t i = 0; i < 2; ++i) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        check_untouched(&engines[i]);
        engine_free(&engines[i]);
    }
    pthread_barrier_destroy(&meeting);
}

int main(void) {
    test_places_are_where_the_reader_would_copy_to();
    test_scattered_cells_are_refused();
    test_uneven_pieces_are_refused();
    test_other_numbers_of_tensors_are_refused();
    test_a_blob_that_was_not_read_to_its_end_is_refused();
    test_another_order_than_the_blobs_is_refused();
    test_tensors_elsewhere_are_refused();
    test_what_is_not_the_blobs_is_copied();
    test_cells_that_nobody_knows_are_left_alone();
    test_two_contexts_at_the_same_time();
    return 0;
}
