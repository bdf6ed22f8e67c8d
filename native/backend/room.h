/* The compute buffers of a context's graphs. llama.cpp reserves them for the largest graph; the system provides memory
 * as it is written. */
#ifndef LLMAAS_ROOM_H
#define LLMAAS_ROOM_H

#include "abi.h"
#include "pages.h"

#include <stdbool.h>
#include <stdint.h>

enum { LLMAAS_ROOM_BUFFERS = 4 };

typedef struct llmaas_room {
    ggml_backend_buffer_t buffers[LLMAAS_ROOM_BUFFERS]; /* of the last graph */
    llmaas_pages          pages[LLMAAS_ROOM_BUFFERS];
    int                   n_buffers; /* 0: the graph was not looked at yet */
    bool                  has_gpu;   /* a GPU computes other parts of llama.cpp's graphs */
} llmaas_room;

/* Initialize, while the context is being created: ggml's registry has no lock and must not change meanwhile. */
void llmaas_room_init(llmaas_room * room);

/* Forget the buffers: a new graph was made, which will be given memory. */
void llmaas_room_forget(llmaas_room * room);
/* Note the buffers of a graph about to be computed. Return whether it is a new one. */
bool llmaas_room_notice(llmaas_room * room, const struct ggml_cgraph * graph);
/* Give back memory that larger graphs used and this new one does not need. Return by how many bytes memory grows as the
 * graph is computed; negative if more was given back. */
int64_t llmaas_room_fit(const llmaas_room * room, const struct ggml_cgraph * graph);
/* Return the bytes of the last graph's buffers that were never written. */
uint64_t llmaas_room_untouched(const llmaas_room * room);

#endif
