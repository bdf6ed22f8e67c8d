#include "room.h"

#include <sys/mman.h>
#include <unistd.h>

static bool is_known(const llmaas_room * room, ggml_backend_buffer_t buffer) {
    for (int i = 0; i < room->n_buffers; i++) {
        if (room->buffers[i] == buffer) {
            return true;
        }
    }
    return false;
}

void llmaas_room_notice(llmaas_room * room, const struct ggml_cgraph * graph) {
    ggml_backend_buffer_t last = NULL;
    room->n_buffers = 0;
    for (int i = 0; i < graph->n_nodes && room->n_buffers < LLMAAS_ROOM_BUFFERS; i++) {
        const ggml_backend_buffer_t buffer = graph->nodes[i]->buffer;
        if (!buffer || buffer == last || is_known(room, buffer)) {
            continue;
        }
        const int n = room->n_buffers++;
        room->buffers[n] = last = buffer;
        room->begins[n] = (uintptr_t) ggml_backend_buffer_get_base(buffer);
        room->ends[n]   = room->begins[n] + ggml_backend_buffer_get_size(buffer);
    }
}

/* 0 where nobody knows: the memory is gone, or the system does not tell. */
static uint64_t untouched(uintptr_t begin, uintptr_t end) {
    enum { AT_ONCE = 4096 };
    unsigned char   is_resident[AT_ONCE];
    const uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE);
    uint64_t        n    = 0;
    for (uintptr_t at = (begin + page - 1) / page * page; at + page <= end; at += AT_ONCE * page) {
        const uintptr_t n_left = (end - at) / page, n_pages = n_left < AT_ONCE ? n_left : AT_ONCE;
        if (mincore((void *) at, n_pages * page, is_resident) != 0) {
            return 0;
        }
        for (uintptr_t i = 0; i < n_pages; i++) {
            n += is_resident[i] & 1 ? 0 : page;
        }
    }
    return n;
}

uint64_t llmaas_room_untouched(const llmaas_room * room) {
    uint64_t n = 0;
    for (int i = 0; i < room->n_buffers; i++) {
        n += untouched(room->begins[i], room->ends[i]);
    }
    return n;
}
