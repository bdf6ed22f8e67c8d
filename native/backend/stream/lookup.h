/* Rows of a weight that graphs look up by number (embeddings). A file has all rows; each graph reads those that it asks
 * for. */
#ifndef LLMAAS_LOOKUP_H
#define LLMAAS_LOOKUP_H

#include "base/graph.h"

#include <stdbool.h>

typedef struct llmaas_lookup llmaas_lookup;

/* Look up rows at `offset` of fd, which must outlive the lookup. One graph at a time may use it. NULL if out of
 * memory. */
llmaas_lookup * llmaas_lookup_new(int fd, uint64_t offset);
void            llmaas_lookup_free(llmaas_lookup * lookup);

/* Append the nodes that compute `node` (GET_ROWS of the weight). False if out of memory. */
bool llmaas_lookup_rows(llmaas_lookup * lookup, llmaas_graph * graph, struct ggml_tensor * node);

uint64_t llmaas_lookup_read(const llmaas_lookup * lookup); /* bytes read so far */

#endif
