/* The memory that a context's graphs compute in: llama.cpp reserves it for the largest graph, the system gives it as it is
 * written to. */
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
    int                   n_buffers; /* 0: nobody looked at the graph yet */
    bool                  has_gpu;   /* which computes other parts of llama.cpp's graphs */
} llmaas_room;

/* While the context is made: ggml's registry, which has no lock, must not change meanwhile. */
void llmaas_room_init(llmaas_room * room);

/* A new graph was made, which will be given memory. */
void llmaas_room_forget(llmaas_room * room);
/* A graph is about to be computed. True: it is a new one. */
bool llmaas_room_notice(llmaas_room * room, const struct ggml_cgraph * graph);
/* Give memory back that larger graphs were computed in, and this new one does not need. Returns by how many bytes memory grows
 * as it is computed; below 0: what was given back is more. */
int64_t llmaas_room_fit(const llmaas_room * room, const struct ggml_cgraph * graph);
/* Bytes of what the last graph computed in that nothing was ever written to. */
uint64_t llmaas_room_untouched(const llmaas_room * room);

#endif
