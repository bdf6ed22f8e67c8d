#include "room.h"

static bool is_known(const llmaas_room * room, ggml_backend_buffer_t buffer) {
    for (int i = 0; i < room->n_buffers; i++) {
        if (room->buffers[i] == buffer) {
            return true;
        }
    }
    return false;
}

void llmaas_room_forget(llmaas_room * room) { room->n_buffers = 0; }

void llmaas_room_notice(llmaas_room * room, const struct ggml_cgraph * graph) {
    if (room->n_buffers > 0) { /* a graph that is used again stays where it is */
        return;
    }
    for (int i = 0; i < graph->n_nodes && room->n_buffers < LLMAAS_ROOM_BUFFERS; i++) {
        const ggml_backend_buffer_t buffer = graph->nodes[i]->buffer;
        if (buffer && !is_known(room, buffer)) {
            const int n = room->n_buffers++;
            room->buffers[n] = buffer;
            room->pages[n] = llmaas_pages_in(ggml_backend_buffer_get_base(buffer), ggml_backend_buffer_get_size(buffer));
        }
    }
}

uint64_t llmaas_room_untouched(const llmaas_room * room) {
    uint64_t n = 0, n_resident;
    for (int i = 0; i < room->n_buffers; i++) {
        const llmaas_pages pages = room->pages[i];
        n += llmaas_pages_resident(pages, &n_resident) ? pages.end - pages.start - n_resident : 0;
    }
    return n;
}
