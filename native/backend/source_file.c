/* Weights that are nowhere in memory: what a product needs is read from the model file just before it. */
#include "weights.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#define PAGE 4096u

struct state {
    int      fd;
    uint64_t offset;
};

void * llmaas_file_state(int fd, uint64_t offset) {
    struct state * state = malloc(sizeof *state);
    if (state) {
        *state = (struct state) {fd, offset};
    }
    return state;
}

static bool load(llmaas_weight * weight, const void * bytes) {
    (void) weight, (void) bytes; /* dropped: the file has them */
    return true;
}

static void unload(llmaas_weight * weight) {
    free(weight->state);
    weight->state = NULL;
}

static const char * problem(const llmaas_weight * weight) {
    (void) weight;
    return NULL;
}

static void round_extents(const llmaas_weight * weight, int64_t * n_rows, int64_t * n_columns) {
    const int64_t block = ggml_blck_size(weight->tensor->type);
    *n_columns = (*n_columns + block - 1) / block * block;
    (void) n_rows;
}

/* Whole pages [begin, end) of the file go to `bytes`. */
struct fetch {
    llmaas_graph * graph;
    int            fd;
    uint64_t       begin;
    uint64_t       end;
    uint64_t       needed; /* the last page may reach beyond the end of the file; what a tensor needs does not */
    char *         bytes;
};

static void fetch(void * arg, int ith, int nth) {
    const struct fetch * fetch   = arg;
    const uint64_t       n_pages = (fetch->end - fetch->begin) / PAGE;
    const uint64_t       stop    = fetch->begin + n_pages * (uint64_t) (ith + 1) / (uint64_t) nth * PAGE;
    uint64_t             at      = fetch->begin + n_pages * (uint64_t) ith / (uint64_t) nth * PAGE;
    while (at < stop) {
        const ssize_t n = pread(fetch->fd, fetch->bytes + (at - fetch->begin), stop - at, (off_t) at);
        if (n > 0) {
            at += (uint64_t) n;
        } else if (n == 0 || errno != EINTR) {
            if (at < fetch->needed) {
                llmaas_graph_fail(fetch->graph);
            }
            return;
        }
    }
}

static bool multiply(
    const llmaas_weight * weight, llmaas_graph * graph, struct ggml_tensor * node, int64_t n_rows, int64_t n_columns) {
    const struct ggml_tensor * tensor = weight->tensor;
    const struct state *       state  = weight->state;
    /* The rows in use of a matrix lie together; of several matrices (experts), everything is read. */
    const size_t   n_bytes = tensor->ne[2] == 1 ? (size_t) n_rows * tensor->nb[1] : ggml_nbytes(tensor);
    const uint64_t begin   = state->offset / PAGE * PAGE;
    const uint64_t end     = (state->offset + n_bytes + PAGE - 1) / PAGE * PAGE;
    char *         memory  = llmaas_graph_scratch(graph, 0, end - begin + PAGE);
    struct ggml_tensor * fetched = llmaas_graph_copy(graph, tensor);
    if (!memory || !fetched) {
        return false;
    }
    memory += (PAGE - (uintptr_t) memory % PAGE) % PAGE;
    const struct fetch arg = {graph, state->fd, begin, end, state->offset + n_bytes, memory};
    if (!llmaas_graph_step(graph, fetch, &arg, sizeof arg)) {
        return false;
    }
    fetched->data   = memory + (state->offset - begin);
    fetched->buffer = NULL; /* plain memory to ggml-cpu */
    fetched->extra  = NULL;
    return llmaas_append_product(graph, fetched, node, n_rows, n_columns);
}

const llmaas_source_ops llmaas_source_file = {
    .load = load, .unload = unload, .problem = problem, .round = round_extents, .multiply = multiply};
