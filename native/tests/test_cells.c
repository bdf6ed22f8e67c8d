/* The memory of KV cells: what graphs reveal about it, and giving it back. */
#include "attention/cells.h"
#include "check.h"

#include "ggml-alloc.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { N_CELLS = 4096, N_EMBD = 64, N_HEAD = 2, TOKEN_BYTES = 2 * 2 * N_EMBD, N_BYTES = N_CELLS * TOKEN_BYTES };

/* A layer's cache: keys and values, F16, in one buffer. */
typedef struct cache {
    struct ggml_context * ctx;
    struct ggml_tensor *  keys;
    struct ggml_tensor *  values;
    ggml_backend_buffer_t buffer;
} cache;

static struct ggml_context * context_new(void) {
    return ggml_init((struct ggml_init_params) {.mem_size = 1 << 20, .no_alloc = true});
}

static cache cache_in(ggml_backend_buffer_t buffer) {
    cache made  = {.ctx = context_new(), .buffer = buffer};
    made.keys   = ggml_new_tensor_3d(made.ctx, GGML_TYPE_F16, N_EMBD, N_CELLS, 1);
    made.values = ggml_new_tensor_3d(made.ctx, GGML_TYPE_F16, N_EMBD, N_CELLS, 1);
    ggml_set_name(made.keys, "cache_k_l0");
    ggml_set_name(made.values, "cache_v_l0");
    struct ggml_tallocr place = ggml_tallocr_new(buffer);
    CHECK(ggml_tallocr_alloc(&place, made.keys) == GGML_STATUS_SUCCESS);
    CHECK(ggml_tallocr_alloc(&place, made.values) == GGML_STATUS_SUCCESS);
    ggml_backend_buffer_clear(buffer, 0);
    return made;
}

static cache cache_new(void) {
    return cache_in(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), N_BYTES));
}

static void cache_free(cache * old) {
    ggml_backend_buffer_free(old->buffer);
    ggml_free(old->ctx);
}

/* Note a graph that views the keys of cells 0..n-1, as llama.cpp's attention does. */
static void notice(llmaas_cells * cells, const cache * of, int64_t n, bool is_creation) {
    struct ggml_context * ctx   = context_new();
    struct ggml_cgraph *  graph = ggml_new_graph(ctx);
    const size_t          row   = of->keys->nb[1];
    struct ggml_tensor *  keys =
        ggml_view_4d(ctx, of->keys, N_EMBD / N_HEAD, N_HEAD, n, 1, row / N_HEAD, row, row * N_CELLS, 0);
    ggml_build_forward_expand(graph, ggml_permute(ctx, keys, 0, 2, 1, 3));
    llmaas_cells_notice(cells, graph, is_creation);
    ggml_free(ctx);
}

static void compute(llmaas_cells * cells, const cache * of, int64_t n) {
    notice(cells, of, n, false);
    llmaas_cells_reach(cells);
}

static void test_nothing_is_known_before_the_first_graph(void) {
    llmaas_cells             cells  = {0};
    const llmaas_cell_memory memory = llmaas_cells_memory(&cells);
    CHECK(memory.n_cells == 0 && memory.n_bytes == 0 && memory.n_touched == 0);
    CHECK(llmaas_cells_release(&cells) == LLMAAS_EUNSUPPORTED);
}

static void test_all_is_touched_until_it_is_released(void) {
    llmaas_cells cells = {0};
    cache        kv    = cache_new();
    notice(&cells, &kv, N_CELLS, true);
    llmaas_cell_memory memory = llmaas_cells_memory(&cells);
    CHECK(memory.n_cells == N_CELLS && memory.n_bytes == N_BYTES && memory.n_touched == N_BYTES);
    compute(&cells, &kv, 256);
    CHECK(llmaas_cells_memory(&cells).n_touched == N_BYTES);
    CHECK(llmaas_cells_release(&cells) == LLMAAS_OK);
    memory = llmaas_cells_memory(&cells);
    CHECK(memory.n_bytes == N_BYTES && memory.n_touched == 0);
    cache_free(&kv);
}

static void test_graphs_that_are_not_computed_reach_nothing(void) {
    llmaas_cells cells = {0};
    cache        kv    = cache_new();
    notice(&cells, &kv, N_CELLS, true);
    CHECK(llmaas_cells_release(&cells) == LLMAAS_OK);
    llmaas_cells_reach(&cells); /* a graph of another kind: without attention */
    CHECK(llmaas_cells_memory(&cells).n_touched == 0);
    notice(&cells, &kv, N_CELLS, false); /* llama.cpp reserves memory for this graph */
    CHECK(llmaas_cells_memory(&cells).n_touched == 0);
    compute(&cells, &kv, 512);
    CHECK(llmaas_cells_memory(&cells).n_touched == 512 * TOKEN_BYTES);
    compute(&cells, &kv, 256);
    CHECK(llmaas_cells_memory(&cells).n_touched == 512 * TOKEN_BYTES);
    CHECK(llmaas_cells_release(&cells) == LLMAAS_OK);
    llmaas_cells_reach(&cells); /* the previous graph once more */
    CHECK(llmaas_cells_memory(&cells).n_touched == 256 * TOKEN_BYTES);
    compute(&cells, &kv, N_CELLS);
    CHECK(llmaas_cells_memory(&cells).n_touched == N_BYTES);
    cache_free(&kv);
}

static void test_released_cells_are_zeros_and_cost_memory_as_they_are_written(void) {
    llmaas_cells cells = {0};
    cache        kv    = cache_new();
    compute(&cells, &kv, 256);
    memset(kv.keys->data, 7, ggml_nbytes(kv.keys));
    memset(kv.values->data, 7, ggml_nbytes(kv.values));
    CHECK(llmaas_cells_release(&cells) == LLMAAS_OK);
    memset(kv.values->data, 1, ggml_nbytes(kv.values)); /* much more than 256 cells hold, as if it were transposed */
    compute(&cells, &kv, 256);
    const uint64_t n_touched = llmaas_cells_memory(&cells).n_touched;
    CHECK(n_touched > N_BYTES / 2 - 65536 && n_touched < N_BYTES / 2 + 65536);

    const unsigned char * bytes   = kv.keys->data;
    size_t                n_zeros = 0;
    for (size_t i = 0; i < ggml_nbytes(kv.keys); ++i) {
        CHECK(bytes[i] == 0 || bytes[i] == 7);
        n_zeros += bytes[i] == 0;
    }
    CHECK(n_zeros > ggml_nbytes(kv.keys) - 2 * 65536); /* all but its first and last pages */
    cache_free(&kv);
}

static void test_two_caches_are_left_alone(void) {
    llmaas_cells cells = {0};
    cache        kv    = cache_new();
    cache        other = cache_new();
    compute(&cells, &kv, 256);
    compute(&cells, &other, 256);
    CHECK(llmaas_cells_memory(&cells).n_cells == 0);
    memset(kv.keys->data, 7, ggml_nbytes(kv.keys));
    CHECK(llmaas_cells_release(&cells) == LLMAAS_EUNSUPPORTED);
    CHECK(((char *) kv.keys->data)[N_BYTES / 4] == 7);
    cache_free(&other);
    cache_free(&kv);
}

/* Check that memory that would not come back as zeros is refused. */
static void check_refused(int flags, int file) {
    char * bytes = mmap(NULL, N_BYTES, PROT_READ | PROT_WRITE, flags, file, 0);
    CHECK(bytes != MAP_FAILED);
    llmaas_cells cells = {0};
    cache        kv    = cache_in(ggml_backend_cpu_buffer_from_ptr(bytes, N_BYTES));
    compute(&cells, &kv, 256);
    memset(bytes, 7, N_BYTES);
    CHECK(llmaas_cells_release(&cells) == LLMAAS_EUNSUPPORTED);
    CHECK(bytes[0] == 7 && bytes[N_BYTES - 1] == 7);
    CHECK(llmaas_cells_memory(&cells).n_touched == N_BYTES);
    cache_free(&kv);
    munmap(bytes, N_BYTES);
}

static void test_memory_that_others_share_or_files_back_is_left_alone(void) {
    const int file = memfd_create("cells", MFD_CLOEXEC);
    CHECK(file >= 0 && ftruncate(file, N_BYTES) == 0);
    check_refused(MAP_SHARED, file);
    check_refused(MAP_PRIVATE, file);
    check_refused(MAP_SHARED | MAP_ANONYMOUS, -1);
    close(file);
}

int main(void) {
    test_nothing_is_known_before_the_first_graph();
    test_all_is_touched_until_it_is_released();
    test_graphs_that_are_not_computed_reach_nothing();
    test_released_cells_are_zeros_and_cost_memory_as_they_are_written();
    test_two_caches_are_left_alone();
    test_memory_that_others_share_or_files_back_is_left_alone();
    return 0;
}
