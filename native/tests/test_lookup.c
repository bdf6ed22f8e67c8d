/* Rows that are looked up in a file: each node of a graph gets its own rows, and a failure gives zeros. */
#include "check.h"

#include "stream/lookup.h"

#include <fcntl.h>
#include <unistd.h>

enum { N = 1000, N_ROWS = 300, FIRST_AT = 123 };

static int file_new(const struct ggml_tensor * weight) {
    char      name[] = "/tmp/llmaas-lookup-XXXXXX";
    const int made   = mkstemp(name);
    CHECK(made >= 0 && pwrite(made, weight->data, ggml_nbytes(weight), FIRST_AT) == (ssize_t) ggml_nbytes(weight));
    CHECK(unlink(name) == 0);
    return made;
}

static struct ggml_tensor * numbers_new(struct ggml_context * ctx, int64_t n) {
    struct ggml_tensor * numbers = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n);
    for (int64_t i = 0; i < n; i++) {
        ((int32_t *) numbers->data)[i] = (int32_t) rnd_below(N_ROWS);
    }
    return numbers;
}

static void compute(struct ggml_cgraph * graph) {
    struct ggml_cplan plan = ggml_graph_plan(graph, 2, NULL);
    plan.work_data         = exact(plan.work_size);
    CHECK(ggml_graph_compute(graph, &plan) == GGML_STATUS_SUCCESS);
    free(plan.work_data);
}

static bool has_its_rows(const struct ggml_tensor * node) {
    const struct ggml_tensor * weight = node->src[0], * numbers = node->src[1];
    for (int64_t i = 0; i < numbers->ne[0]; i++) {
        const size_t row = (size_t) ((const int32_t *) numbers->data)[i];
        if (memcmp((char *) node->data + i * node->nb[1], (char *) weight->data + row * weight->nb[1], N * sizeof(float)) != 0) {
            return false;
        }
    }
    return true;
}

static bool is_zero(const struct ggml_tensor * node) {
    const char * bytes = node->data;
    return bytes[0] == 0 && memcmp(bytes, bytes + 1, ggml_nbytes(node) - 1) == 0;
}

/* Look up rows of one weight twice in a graph: first few, and then more, for which the lookup needs more room. */
static void check_two_nodes(struct ggml_context * ctx, struct ggml_tensor * weight, int fd, bool can_read) {
    llmaas_lookup *      lookup   = llmaas_lookup_new(fd, FIRST_AT);
    llmaas_graph *       graph    = llmaas_graph_new();
    struct ggml_cgraph * original = ggml_new_graph(ctx);
    struct ggml_tensor * nodes[]  = {
        ggml_get_rows(ctx, weight, numbers_new(ctx, 3)), ggml_get_rows(ctx, weight, numbers_new(ctx, 200))};
    CHECK(lookup && graph);
    llmaas_graph_begin(graph, original);
    for (int i = 0; i < 2; i++) {
        ggml_build_forward_expand(original, nodes[i]);
        memset(nodes[i]->data, 0xff, ggml_nbytes(nodes[i]));
        CHECK(llmaas_lookup_rows(lookup, graph, nodes[i]));
    }
    struct ggml_cgraph * rewritten = llmaas_graph_end(graph);
    CHECK(rewritten);
    compute(rewritten);
    CHECK(llmaas_graph_failed(graph) == !can_read);
    for (int i = 0; i < 2; i++) {
        CHECK(can_read ? has_its_rows(nodes[i]) : is_zero(nodes[i]));
    }
    const llmaas_lookup_stats stats = llmaas_lookup_read_stats(lookup);
    CHECK(!can_read || (stats.n_read >= 203 * N * sizeof(float) && stats.stalled_ns > 0));
    llmaas_graph_free(graph);
    llmaas_lookup_free(lookup);
}

int main(void) {
    struct ggml_context * ctx = ggml_init((struct ggml_init_params){.mem_size = 8u << 20});
    CHECK(ctx);
    struct ggml_tensor * weight = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, N, N_ROWS);
    for (int64_t i = 0; i < ggml_nelements(weight); i++) {
        ((float *) weight->data)[i] = (float) rnd_below(2001) / 1000.0f - 1.0f;
    }
    const int fd = file_new(weight), closed = open("/dev/null", O_WRONLY | O_CLOEXEC);
    check_two_nodes(ctx, weight, fd, true);
    check_two_nodes(ctx, weight, closed, false);
    CHECK(close(fd) == 0 && close(closed) == 0);
    ggml_free(ctx);
    return 0;
}
