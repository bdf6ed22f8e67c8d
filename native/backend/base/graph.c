/* Graphs being rewritten. */
#include "base/graph.h"

#include "src/grow.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_BYTES   (64u << 10)
#define SCRATCH_ALIGN 64u
#define N_SLOTS       4

/* Memory for tensors and step arguments. Blocks never move while a graph uses them, and are reused for the next
 * graph. */
struct block {
    struct block * next;
    size_t         size;
    size_t         used;
    _Alignas(64) char bytes[];
};

/* A slot's memory. Memory that it outgrew stays until the graph is done, since earlier nodes point to it. */
struct scratch {
    struct scratch * outgrown;
    size_t           size;
    _Alignas(SCRATCH_ALIGN) char bytes[];
};

struct llmaas_graph {
    struct ggml_cgraph    changed;
    struct ggml_tensor ** nodes;
    size_t                n_nodes;
    size_t                n_capacity;
    struct block *        blocks; /* oldest first */
    struct block *        block;  /* being filled */
    struct scratch *      scratch[N_SLOTS];
    bool                  is_sparse;
    atomic_bool           failed;
};

llmaas_graph * llmaas_graph_new(void) { return calloc(1, sizeof(llmaas_graph)); }

static void free_outgrown(struct scratch * scratch) {
    while (scratch) {
        struct scratch * next = scratch->outgrown;
        free(scratch);
        scratch = next;
    }
}

void llmaas_graph_free(llmaas_graph * graph) {
    if (!graph) {
        return;
    }
    for (struct block * block = graph->blocks; block;) {
        struct block * next = block->next;
        free(block);
        block = next;
    }
    for (int slot = 0; slot < N_SLOTS; slot++) {
        free_outgrown(graph->scratch[slot]);
    }
    free(graph->nodes);
    free(graph);
}

void llmaas_graph_begin(llmaas_graph * graph, struct ggml_cgraph * original) {
    graph->changed = *original;
    graph->n_nodes = 0;
    graph->failed  = false;
    graph->is_sparse = false;
    for (struct block * block = graph->blocks; block; block = block->next) {
        block->used = 0;
    }
    graph->block = graph->blocks;
    for (int slot = 0; slot < N_SLOTS; slot++) {
        if (graph->scratch[slot]) {
            free_outgrown(graph->scratch[slot]->outgrown);
            graph->scratch[slot]->outgrown = NULL;
        }
    }
}

/* Allocate 64-byte aligned memory. NULL if out of memory, and the graph fails. */
static void * take(llmaas_graph * graph, size_t size) {
    size = (size + 63) & ~(size_t) 63;
    while (graph->block && graph->block->size - graph->block->used < size && graph->block->next) {
        graph->block = graph->block->next;
    }
    if (!graph->block || graph->block->size - graph->block->used < size) {
        const size_t   bytes = size > BLOCK_BYTES ? size : BLOCK_BYTES;
        struct block * block = aligned_alloc(64, sizeof *block + bytes);
        if (!block) {
            graph->failed = true;
            return NULL;
        }
        *block = (struct block) {.size = bytes};
        if (graph->block) {
            graph->block->next = block;
        } else {
            graph->blocks = block;
        }
        graph->block = block;
    }
    void * bytes = graph->block->bytes + graph->block->used;
    graph->block->used += size;
    return bytes;
}

void llmaas_graph_append(llmaas_graph * graph, struct ggml_tensor * node) {
    struct ggml_tensor ** nodes = llmaas_grown(graph->nodes, graph->n_nodes, &graph->n_capacity, sizeof *nodes);
    if (!nodes) {
        graph->failed = true;
        return;
    }
    graph->nodes = nodes;
    graph->nodes[graph->n_nodes++] = node;
}

struct ggml_tensor * llmaas_graph_copy(llmaas_graph * graph, const struct ggml_tensor * tensor) {
    struct ggml_tensor * copy = take(graph, sizeof *copy);
    if (copy) {
        *copy = *tensor;
    }
    return copy;
}

struct ggml_tensor * llmaas_graph_slice(
    llmaas_graph * graph, const struct ggml_tensor * tensor, int axis, int64_t first, int64_t n) {
    struct ggml_tensor * slice = llmaas_graph_copy(graph, tensor);
    if (slice) {
        slice->data     = (char *) slice->data + (size_t) first * slice->nb[axis];
        slice->ne[axis] = n;
    }
    return slice;
}

struct ggml_tensor * llmaas_graph_tensor(
    llmaas_graph * graph, int64_t n0, int64_t n1, int64_t n2, int64_t n3, void * data) {
    struct ggml_tensor * tensor = take(graph, sizeof *tensor);
    if (tensor) {
        *tensor = (struct ggml_tensor) {
            .type = GGML_TYPE_F32, .ne = {n0, n1, n2, n3}, .flags = GGML_TENSOR_FLAG_COMPUTE, .data = data};
        tensor->nb[0] = sizeof(float);
        for (int i = 1; i < GGML_MAX_DIMS; i++) {
            tensor->nb[i] = tensor->nb[i - 1] * (size_t) tensor->ne[i - 1];
        }
    }
    return tensor;
}

struct step {
    llmaas_step run;
    _Alignas(16) char arg[];
};

static void run_step(struct ggml_tensor * dst, int ith, int nth, void * user) {
    struct step * step = user;
    step->run(step->arg, ith, nth);
    (void) dst;
}

bool llmaas_graph_step(llmaas_graph * graph, llmaas_step run, const void * arg, size_t size) {
    struct step *        step = take(graph, sizeof *step + size);
    struct ggml_tensor * node = llmaas_graph_tensor(graph, 1, 1, 1, 1, NULL);
    if (!step || !node) {
        return false;
    }
    step->run = run;
    memcpy(step->arg, arg, size);
    const struct llmaas_custom_params custom = {.fun = run_step, .n_tasks = GGML_N_TASKS_MAX, .userdata = step};
    node->op = llmaas_op_number(LLMAAS_OP_CUSTOM);
    memcpy(node->op_params, &custom, sizeof custom);
    llmaas_graph_append(graph, node);
    return true;
}

void * llmaas_graph_scratch(llmaas_graph * graph, int slot, size_t size) {
    struct scratch * scratch = graph->scratch[slot];
    if (!scratch || scratch->size < size) {
        const size_t     bytes = (size + size / 4 + SCRATCH_ALIGN - 1) & ~(size_t) (SCRATCH_ALIGN - 1);
        struct scratch * grown = aligned_alloc(SCRATCH_ALIGN, sizeof *grown + bytes);
        if (!grown) {
            graph->failed = true;
            return NULL;
        }
        *grown = (struct scratch) {.outgrown = scratch, .size = bytes};
        scratch = graph->scratch[slot] = grown;
    }
    return scratch->bytes;
}

void llmaas_graph_fail(llmaas_graph * graph) { graph->failed = true; }
void llmaas_graph_set_sparse(llmaas_graph * graph, bool is_sparse) { graph->is_sparse = is_sparse; }
bool llmaas_graph_is_sparse(const llmaas_graph * graph) { return graph->is_sparse; }

bool llmaas_graph_failed(const llmaas_graph * graph) { return graph->failed; }

struct ggml_cgraph * llmaas_graph_end(llmaas_graph * graph) {
    graph->changed.nodes   = graph->nodes;
    graph->changed.n_nodes = (int) graph->n_nodes;
    graph->changed.uid     = 0; /* a backend that caches by uid must not take it for the original */
    return graph->failed ? NULL : &graph->changed;
}

bool llmaas_graph_is(const llmaas_graph * graph, const struct ggml_cgraph * original) {
    return graph->n_nodes == (size_t) original->n_nodes &&
           memcmp(graph->nodes, original->nodes, graph->n_nodes * sizeof *graph->nodes) == 0;
}
