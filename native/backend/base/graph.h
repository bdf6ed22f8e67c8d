/* A graph being rewritten: ggml's node list with nodes replaced and steps inserted. */
#ifndef LLMAAS_GRAPH_H
#define LLMAAS_GRAPH_H

#include "base/abi.h"
#include "llmaas/base.h"

/* A step. Called on thread ith of nth of the graph's threads; ggml-cpu puts a barrier before and after. */
typedef void (*llmaas_step)(void * arg, int ith, int nth);

typedef struct llmaas_graph llmaas_graph;

llmaas_graph * llmaas_graph_new(void);
void           llmaas_graph_free(llmaas_graph * graph);

/* Start a rewritten version of `original`, with no nodes yet. */
void llmaas_graph_begin(llmaas_graph * graph, struct ggml_cgraph * original);
void llmaas_graph_append(llmaas_graph * graph, struct ggml_tensor * node);

/* Copy `tensor`; the copy belongs to the graph. Edit it, then append it or use it as a source. */
struct ggml_tensor * llmaas_graph_copy(llmaas_graph * graph, const struct ggml_tensor * tensor);
/* Copy `tensor` for its elements first..first+n-1 along `axis`; the data stays where it is. NULL if out of memory, and
 * the graph fails. */
struct ggml_tensor * llmaas_graph_slice(
    llmaas_graph * graph, const struct ggml_tensor * tensor, int axis, int64_t first, int64_t n);
/* Create an F32 tensor of the graph: [n0, n1, n2, n3], contiguous at `data`. */
struct ggml_tensor * llmaas_graph_tensor(
    llmaas_graph * graph, int64_t n0, int64_t n1, int64_t n2, int64_t n3, void * data);

/* Append a step. It gets a copy of the `size` bytes at `arg`, aligned for any type. False if out of memory, and the
 * graph fails. */
bool llmaas_graph_step(llmaas_graph * graph, llmaas_step step, const void * arg, size_t size);

/* Return memory that later nodes may overwrite, aligned to 64 bytes. It is valid for the nodes appended until the next
 * call with the same slot, 0 <= slot < 4. NULL if out of memory, and the graph fails. */
void * llmaas_graph_scratch(llmaas_graph * graph, int slot, size_t size);

/* Set or return whether products with weights that have channels leave out small values. Call begin() first: it resets
 * this. */
void llmaas_graph_set_sparse(llmaas_graph * graph, bool is_sparse);
bool llmaas_graph_is_sparse(const llmaas_graph * graph);

/* Mark the graph as failed, for a step that could not do its work: its results are void. Thread-safe. */
void llmaas_graph_fail(llmaas_graph * graph);
bool llmaas_graph_failed(const llmaas_graph * graph);

/* Return the finished graph, or NULL if memory ran out. It is valid until the next begin and must be computed only
 * once: steps keep state in their arguments. */
struct ggml_cgraph * llmaas_graph_end(llmaas_graph * graph);
/* Return whether the rewritten graph equals the original. */
bool llmaas_graph_is(const llmaas_graph * graph, const struct ggml_cgraph * original);

#endif
