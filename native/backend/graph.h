/* A graph being rewritten: ggml's node list with nodes exchanged and steps put in between. */
#ifndef LLMAAS_GRAPH_H
#define LLMAAS_GRAPH_H

#include "abi.h"
#include "llmaas/base.h"

/* Runs on thread ith of nth of the graph's own; ggml-cpu puts a barrier before and after. */
typedef void (*llmaas_step)(void * arg, int ith, int nth);

typedef struct llmaas_graph llmaas_graph;

llmaas_graph * llmaas_graph_new(void);
void           llmaas_graph_free(llmaas_graph * graph);

/* Start a rewritten `original`, with no nodes yet. */
void llmaas_graph_begin(llmaas_graph * graph, struct ggml_cgraph * original);
void llmaas_graph_append(llmaas_graph * graph, struct ggml_tensor * node);

/* A copy of `tensor` that belongs to the graph; edit it, then append it or use it as a source. */
struct ggml_tensor * llmaas_graph_copy(llmaas_graph * graph, const struct ggml_tensor * tensor);
/* A new F32 tensor of the graph: [n0, n1, n2, n3] contiguous at `data`. */
struct ggml_tensor * llmaas_graph_tensor(
    llmaas_graph * graph, int64_t n0, int64_t n1, int64_t n2, int64_t n3, void * data);

/* Append a step. It gets a copy of the `size` bytes at `arg`, aligned for any type. False: memory, and the graph fails. */
bool llmaas_graph_step(llmaas_graph * graph, llmaas_step step, const void * arg, size_t size);

/* Memory that later nodes may overwrite: valid for the nodes appended until the next call of this function with the
 * same slot, 0 <= slot < 4. 64-byte aligned. NULL: none left, and the graph fails. */
void * llmaas_graph_scratch(llmaas_graph * graph, int slot, size_t size);

/* Whether products of this graph leave out small values where their weights have channels; not after begin(). */
void llmaas_graph_set_sparse(llmaas_graph * graph, bool is_sparse);
bool llmaas_graph_is_sparse(const llmaas_graph * graph);

/* For a step that could not do its work: what the graph computes is void. Thread-safe. */
void llmaas_graph_fail(llmaas_graph * graph);
bool llmaas_graph_failed(const llmaas_graph * graph);

/* The finished graph, or NULL when memory ran out. Valid until the next begin; to be computed once: steps count in their
 * arguments. */
struct ggml_cgraph * llmaas_graph_end(llmaas_graph * graph);
/* Whether nothing was changed after all. */
bool llmaas_graph_is(const llmaas_graph * graph, const struct ggml_cgraph * original);

#endif
