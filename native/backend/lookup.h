/* Rows of a weight that graphs look up by number (embeddings): a file has them all, and a graph reads those that it asks for. */
#ifndef LLMAAS_LOOKUP_H
#define LLMAAS_LOOKUP_H

#include "graph.h"

#include <stdbool.h>

typedef struct llmaas_lookup llmaas_lookup;

/* Rows at `offset` of fd, which lives longer. One graph at a time uses them. NULL: memory. */
llmaas_lookup * llmaas_lookup_new(int fd, uint64_t offset);
void            llmaas_lookup_free(llmaas_lookup * lookup);

/* Append what computes `node` (GET_ROWS of the weight). False: memory. */
bool llmaas_lookup_rows(llmaas_lookup * lookup, llmaas_graph * graph, struct ggml_tensor * node);

uint64_t llmaas_lookup_read(const llmaas_lookup * lookup); /* bytes so far */

#endif
