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

typedef struct llmaas_lookup_stats {
    uint64_t n_read;     /* bytes */
    uint64_t stalled_ns; /* time that graphs waited for rows; a row may have to wait for reads ahead of other weights */
} llmaas_lookup_stats;

llmaas_lookup_stats llmaas_lookup_read_stats(const llmaas_lookup * lookup);

#endif
