/* The compute buffers of a context's graphs. llama.cpp reserves them for the largest graph; the system provides memory
 * as it is written. */
#ifndef LLMAAS_COMPUTE_BUFFER_H
#define LLMAAS_COMPUTE_BUFFER_H

#include "base/abi.h"
#include "base/pages.h"

#include <stdbool.h>
#include <stdint.h>

enum { LLMAAS_MAX_COMPUTE_BUFFERS = 4 };

typedef struct llmaas_compute_buffers {
    ggml_backend_buffer_t buffers[LLMAAS_MAX_COMPUTE_BUFFERS]; /* of the last graph */
    llmaas_pages          pages[LLMAAS_MAX_COMPUTE_BUFFERS];
    int                   n_buffers; /* 0: the graph was not looked at yet */
    bool                  has_gpu;   /* a GPU computes other parts of llama.cpp's graphs */
    uint64_t              n_work, n_work_most; /* bytes of ggml's copy of an operand: so far, and in the largest graph */
} llmaas_compute_buffers;

/* Initialize, while the context is being created: ggml's registry has no lock and must not change meanwhile. */
void llmaas_compute_buffers_init(llmaas_compute_buffers * compute);

/* Note one of the graphs that llama.cpp reserves memory for. */
void llmaas_compute_buffers_reserve(llmaas_compute_buffers * compute, const struct ggml_cgraph * graph);
/* Forget the buffers: a new graph was made, which will be given memory. */
void llmaas_compute_buffers_forget(llmaas_compute_buffers * compute);
/* Note the buffers of a graph about to be computed. Return whether it is a new one. */
bool llmaas_compute_buffers_notice(llmaas_compute_buffers * compute, const struct ggml_cgraph * graph);
/* Give back memory that larger graphs used and this new one does not need. Return by how many bytes memory grows as the
 * graph is computed; negative if more was given back. */
int64_t llmaas_compute_buffers_fit(llmaas_compute_buffers * compute, const struct ggml_cgraph * graph);
/* Return the bytes of the last graph's buffers that were never written, and by how many the copy of an operand may still
 * grow. */
uint64_t llmaas_compute_buffers_untouched(const llmaas_compute_buffers * compute);

#endif
