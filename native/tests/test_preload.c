/* Preloading: what was read ahead is used, counted and bounded, and results do not change. */
#include "check.h"

#include "base/graph.h"
#include "stream/stream.h"

#include <fcntl.h>
#include <unistd.h>

enum {
    N_LAYERS   = 6,
    N_FAMILIES = 2,
    N          = N_LAYERS * N_FAMILIES,
    WIDTH      = 128,  /* channels of an operand */
    ROWS       = 8192, /* so a channel has 4096 bytes */
    BYTES      = ROWS / 2,
    PAGES      = N * WIDTH,
    ALL        = PAGES * BYTES,
};

static float    values[N][WIDTH]; /* activations; channels from 0.5 on are active */
static uint16_t scales[WIDTH / 32][ROWS];
static int      n_threads = 1;
static char *   content;
static char     name[] = "/tmp/llmaas-preload-XXXXXX";

/* The matrices of all layers, for one token. */
typedef struct model {
    llmaas_stream *       stream;
    llmaas_graph *        graph;
    struct ggml_context * ctx;
    struct ggml_cgraph *  original;
    struct ggml_tensor *  products[N];
    llmaas_columns        columns[N];
    float                 results[N][ROWS];
    int                   fd;
} model;

static void write_file(size_t n_bytes) {
    FILE * file = fopen(name, "wb");
    CHECK(file && fwrite(content, 1, n_bytes, file) == n_bytes && fclose(file) == 0);
}

/* Return operand i of a file whose groups have n_group layers; its layer is i / N_FAMILIES. */
static llmaas_operand_spec spec_of(size_t i, size_t n_group, uint32_t * order) {
    const size_t group = i / N_FAMILIES / n_group, family = i % N_FAMILIES, at = i / N_FAMILIES % n_group;
    const size_t first = (group * N_FAMILIES + family) * n_group * WIDTH * BYTES;
    for (uint32_t j = 0; j < WIDTH; j++) {
        order[j] = (j * 37 + (uint32_t) group) % WIDTH;
    }
    return (llmaas_operand_spec) {
        .pool = (uint32_t) family, .n_channels = WIDTH, .n_bytes = BYTES, .offset = first + at * BYTES, .stride = n_group * BYTES,
        .order = order, .cache = LLMAAS_CHANNELS_RECENT, .threshold = 0.5f, .predictor = -1};
}

static model * model_new(size_t n_group, bool is_preloaded) {
    model * m = calloc(1, sizeof *m);
    CHECK(m);
    m->stream   = llmaas_stream_new();
    m->graph    = llmaas_graph_new();
    m->ctx      = ggml_init((struct ggml_init_params) {.mem_size = 1u << 20, .no_alloc = true});
    m->original = ggml_new_graph(m->ctx);
    m->fd       = open(name, O_RDONLY | O_CLOEXEC | O_DIRECT);
    m->fd       = m->fd < 0 ? open(name, O_RDONLY | O_CLOEXEC) : m->fd;
    CHECK(m->fd >= 0);
    llmaas_operand * operands[N];
    for (size_t i = 0; i < N; i++) {
        uint32_t                  order[WIDTH];
        const llmaas_operand_spec spec  = spec_of(i, n_group, order);
        const size_t              group = i / N_FAMILIES / n_group;
        llmaas_operand * predictor = is_preloaded && group > 0 ? operands[(group - 1) * n_group * N_FAMILIES + i % N_FAMILIES] : NULL;
        CHECK(!predictor || llmaas_operand_predicts(predictor, m->fd, &spec));
        operands[i]   = llmaas_channels_add(llmaas_stream_channels(m->stream), m->fd, &spec, predictor);
        m->columns[i] = (llmaas_columns) {.operand = operands[i], .n_bits = 4, .n_scales = ROWS, .scales = scales[0]};
        struct ggml_tensor * weight = ggml_new_tensor_2d(m->ctx, GGML_TYPE_F32, WIDTH, ROWS);
        struct ggml_tensor * x      = ggml_new_tensor_1d(m->ctx, GGML_TYPE_F32, WIDTH);
        m->products[i]       = ggml_mul_mat(m->ctx, weight, x);
        x->data              = values[i];
        m->products[i]->data = m->results[i];
    }
    CHECK(llmaas_stream_set_reading(m->stream, &(llmaas_reading) {16, 64 << 10, 0}));
    return m;
}

static void model_free(model * m) {
    llmaas_stream_free(m->stream);
    llmaas_graph_free(m->graph);
    ggml_free(m->ctx);
    close(m->fd);
    free(m);
}

/* Compute a graph as the engine does. Return false if it failed. */
static bool compute(model * m) {
    llmaas_stream_begin(m->stream, m->graph, 0);
    llmaas_graph_begin(m->graph, m->original);
    for (size_t i = 0; i < N; i++) {
        CHECK(llmaas_columns_multiply(&m->columns[i], m->graph, m->products[i]));
    }
    struct ggml_cgraph * graph = llmaas_graph_end(m->graph);
    CHECK(graph && llmaas_stream_start(m->stream));
    struct ggml_cplan plan = ggml_graph_plan(graph, n_threads, NULL);
    plan.work_data         = exact(plan.work_size);
    CHECK(ggml_graph_compute(graph, &plan) == GGML_STATUS_SUCCESS);
    free(plan.work_data);
    llmaas_stream_end(m->stream);
    return !llmaas_graph_failed(m->graph);
}

/* Make activations that are the same in consecutive layers, except for `n_other` of 100. */
static void next_values(uint32_t n_other) {
    for (size_t i = 0; i < N; i++) {
        for (size_t j = 0; j < WIDTH; j++) {
            const bool is_new = i < N_FAMILIES || rnd_below(100) < n_other;
            values[i][j]      = is_new ? (float) rnd_below(2001) / 1000.0f - 1.0f : values[i - N_FAMILIES][j];
        }
    }
}

static bool same_results(const model * a, const model * b) { return memcmp(a->results, b->results, sizeof a->results) == 0; }

static llmaas_stream_stats stats_of(const model * m) {
    llmaas_stream_stats stats;
    llmaas_stream_read_stats(m->stream, &stats);
    return stats;
}

static void test_results_are_the_same(size_t n_group) {
    model * plain = model_new(n_group, false), * preloaded = model_new(n_group, true);
    llmaas_stream_set_memory(plain->stream, ALL / 3, 0);
    for (int i = 0; i < 24; i++) {
        const size_t kept = (size_t) ALL * (size_t) (i % 4) / 3, arena = (size_t[]) {0, 4096, 1 << 17, 1 << 20, 8 << 20}[i % 5];
        llmaas_stream_set_memory(preloaded->stream, kept, arena);
        if (i % 7 == 6) {
            const llmaas_reading reading = {.depth = 1 + rnd_below(256), .n_bytes = 4096u << rnd_below(13), .n_gap = 4096 * (i % 3)};
            CHECK(llmaas_stream_set_reading(preloaded->stream, &reading));
        }
        next_values(20);
        CHECK(compute(plain) && compute(preloaded) && same_results(plain, preloaded));
        CHECK(stats_of(preloaded).n_kept <= kept && stats_of(preloaded).n_passing >= arena);
    }
    CHECK(stats_of(preloaded).n_channel_preloads > 0 && stats_of(plain).n_channel_preloads == 0);
    CHECK(stats_of(preloaded).n_wasted > 0 && stats_of(plain).n_wasted == 0);
    model_free(plain);
    model_free(preloaded);
}

static void test_what_is_kept_is_the_same(void) {
    model * plain = model_new(1, false), * preloaded = model_new(1, true);
    llmaas_stream_set_memory(plain->stream, ALL / 2, 4 << 20);
    llmaas_stream_set_memory(preloaded->stream, ALL / 2, 4 << 20);
    for (int i = 0; i < 12; i++) {
        n_threads = 1 + i % 2;
        next_values(30);
        CHECK(compute(plain) && compute(preloaded) && same_results(plain, preloaded));
    }
    n_threads = 1;
    const llmaas_stream_stats a = stats_of(plain), b = stats_of(preloaded);
    CHECK(a.n_channel_hits == b.n_channel_hits && a.n_channel_misses == b.n_channel_misses && a.n_kept == b.n_kept);
    model_free(plain);
    model_free(preloaded);
}

/* Check layers that are all alike: nothing is read in vain or twice. */
static void test_right_predictions(size_t n_group) {
    model * m = model_new(n_group, true);
    llmaas_stream_set_memory(m->stream, 0, 8 << 20);
    next_values(0);
    CHECK(compute(m));
    const llmaas_stream_stats stats = stats_of(m);
    CHECK(stats.n_wasted == 0 && stats.n_read == stats.n_channel_misses * BYTES && stats.n_channel_preloads > 0);
    llmaas_stream_set_memory(m->stream, ALL, 8 << 20);
    CHECK(compute(m) && compute(m));
    CHECK(stats_of(m).n_read == 2 * stats.n_read); /* kept channels are not read ahead */
    model_free(m);
}

/* Check layers that have nothing in common: all reads ahead are in vain. */
static void test_wrong_predictions(void) {
    model * m = model_new(1, true);
    llmaas_stream_set_memory(m->stream, 0, 8 << 20);
    for (size_t i = 0; i < N; i++) {
        for (size_t j = 0; j < WIDTH; j++) {
            values[i][j] = (i / N_FAMILIES + j) % 2 ? 1.0f : 0.1f;
        }
    }
    CHECK(compute(m));
    const llmaas_stream_stats stats = stats_of(m);
    CHECK(stats.n_channel_preloads == 0 && stats.n_wasted > 0);
    CHECK(stats.n_read == stats.n_channel_misses * BYTES + stats.n_wasted);
    model_free(m);
}

/* Check that reads ahead still needed never exceed their memory, which is reused again and again. */
static void test_memory_is_bounded(void) {
    enum { N_AHEAD = 8 };
    model * m = model_new(1, true);
    llmaas_stream_set_memory(m->stream, 0, N_AHEAD * BYTES);
    next_values(0);
    CHECK(compute(m));
    const llmaas_stream_stats stats = stats_of(m);
    CHECK(stats.n_channel_preloads > 2 * N_AHEAD && stats.n_channel_preloads <= N_AHEAD * N);
    model_free(m);
}

/* Check that a failed read matters only if somebody needs its bytes, and only to that graph. */
static void test_failed_reads(size_t n_group) {
    model * plain = model_new(n_group, false), * m = model_new(n_group, true);
    llmaas_stream_set_memory(m->stream, ALL / 2, 8 << 20);
    next_values(10);
    CHECK(compute(plain));
    write_file(ALL - n_group * N_FAMILIES * WIDTH * BYTES);
    CHECK(!compute(m));
    for (size_t i = 0; i < n_group * N_FAMILIES; i++) {
        memset(values[N - 1 - i], 0, sizeof values[0]);
    }
    CHECK(compute(m)); /* the read was in vain */
    memset(values, 0, sizeof values);
    for (size_t i = 0; i < N; i++) {
        values[i][0] = 1;
    }
    CHECK(!compute(m)); /* a single channel, which was to be read ahead */
    write_file(ALL);
    next_values(10);
    CHECK(compute(plain) && compute(m) && same_results(plain, m));
    model_free(plain);
    model_free(m);
}

static void test_who_can_be_predicted(void) {
    model *                m = model_new(2, true);
    uint32_t               order[WIDTH];
    const llmaas_operand * predictor = m->columns[0].operand; /* predicts the family's operands in layers 2 and 3 */
    llmaas_operand_spec    spec      = spec_of(2 * N_FAMILIES, 2, order);
    CHECK(!llmaas_operand_predicts(predictor, m->fd, &spec)); /* overlaps another operand */
    spec.offset += 2 * BYTES;
    CHECK(!llmaas_operand_predicts(predictor, m->fd, &spec)); /* in the next record */
    predictor = m->columns[N - 1].operand; /* predicts none */
    CHECK(llmaas_operand_predicts(predictor, m->fd, &spec));
    spec.n_channels = WIDTH / 2;
    CHECK(!llmaas_operand_predicts(predictor, m->fd, &spec));
    spec = (llmaas_operand_spec) {.n_channels = WIDTH, .cache = LLMAAS_CHANNELS_STREAMED};
    CHECK(!llmaas_operand_predicts(predictor, m->fd, &spec));
    model_free(m);
}

int main(void) {
    const int fd = mkstemp(name);
    content      = (char *) exact(ALL);
    fill_random((uint8_t *) content, ALL);
    for (size_t i = 0; i < WIDTH / 32; i++) {
        for (size_t j = 0; j < ROWS; j++) {
            scales[i][j] = (uint16_t) (0x3000 + rnd_below(0x400));
        }
    }
    CHECK(fd >= 0 && close(fd) == 0);
    write_file(ALL);
    for (size_t n_group = 1; n_group <= 3; n_group++) {
        test_results_are_the_same(n_group);
        test_right_predictions(n_group);
        test_failed_reads(n_group);
    }
    test_what_is_kept_is_the_same();
    test_wrong_predictions();
    test_memory_is_bounded();
    test_who_can_be_predicted();
    unlink(name);
    free(content);
    return 0;
}
