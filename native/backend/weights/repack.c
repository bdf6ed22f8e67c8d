#include "weights/repack.h"

#include "base/abi.h"
#include "base/cpu.h"
#include "llmaas/engine.h"

#include <pthread.h>
#include <stdlib.h>

/* An empty buffer: products only look at its type. */
static ggml_backend_buffer_t marker;
static pthread_once_t        marker_once = PTHREAD_ONCE_INIT;

static void make_marker(void) {
    if (llmaas_repack_type()) {
        marker = ggml_backend_buft_alloc_buffer(llmaas_repack_type(), 64);
    }
}

bool llmaas_repack_mark(struct ggml_tensor * weight) {
    pthread_once(&marker_once, make_marker);
    struct ggml_tensor marked = *weight;
    if (!marker || !llmaas_cpu_multiplies(llmaas_repack_type(), weight)) {
        return false;
    }
    marked.buffer = marker;
    if (marker->iface.init_tensor(marker, &marked) != GGML_STATUS_SUCCESS || !marked.extra) {
        return false;
    }
    *weight = marked;
    return true;
}

static struct ggml_tensor stack(int32_t type, const int64_t * ne) {
    struct ggml_tensor weight = {.type = (enum ggml_type) type, .ne = {ne[0], ne[1], ne[2], 1}};
    weight.nb[0] = ggml_type_size(weight.type);
    weight.nb[1] = ggml_row_size(weight.type, ne[0]);
    weight.nb[2] = weight.nb[1] * (size_t) ne[1];
    weight.nb[3] = weight.nb[2] * (size_t) ne[2];
    return weight;
}

llmaas_status llmaas_repack(int32_t type, const int64_t * ne, const void * plain, void * packed) {
    if (type < 0 || type >= GGML_TYPE_COUNT || ggml_blck_size((enum ggml_type) type) == 0 || ne[0] < 1 || ne[1] < 1 ||
        ne[2] < 1 || ne[0] % ggml_blck_size((enum ggml_type) type) != 0) {
        return LLMAAS_EINVAL;
    }
    struct ggml_tensor weight = stack(type, ne);
    if (!llmaas_repack_mark(&weight)) {
        return LLMAAS_EUNSUPPORTED;
    }
    weight.data = packed;
    marker->iface.set_tensor(marker, &weight, plain, 0, ggml_nbytes(&weight));
    return LLMAAS_OK;
}

/* Repack rows in which no byte repeats its neighbor; return the FNV-1a hash of the result. */
static uint64_t probe(int32_t type, const int64_t * ne, size_t n_bytes) {
    uint8_t * plain = malloc(2 * n_bytes), * packed = plain + n_bytes;
    uint64_t  hash  = 14695981039346656037u;
    for (size_t i = 0; plain && i < n_bytes; i++) {
        plain[i] = (uint8_t) (i * 167 + i / 256);
    }
    if (plain && llmaas_repack(type, ne, plain, packed) == LLMAAS_OK) {
        for (size_t i = 0; i < n_bytes; i++) {
            hash = (hash ^ packed[i]) * 1099511628211u;
        }
    }
    free(plain);
    return hash | 1; /* 0 means: not repacked */
}

/* The number of rows affects only whether a type is repacked, not its layout, so a small weight is probed. */
uint64_t llmaas_repack_layout(int32_t type, const int64_t * ne) {
    enum { ROWS = 16, BLOCKS = 2 };
    static _Atomic uint64_t found[GGML_TYPE_COUNT]; /* racing threads store the same value */
    if (type < 0 || type >= GGML_TYPE_COUNT || ggml_blck_size((enum ggml_type) type) == 0) {
        return 0;
    }
    const int64_t      small[3] = {BLOCKS * ggml_blck_size((enum ggml_type) type), ROWS, 1};
    struct ggml_tensor weight = stack(type, ne), part = stack(type, small);
    if (!llmaas_repack_mark(&weight) || !llmaas_repack_mark(&part) || part.extra != weight.extra) {
        return 0;
    }
    if (found[type] == 0) {
        found[type] = probe(type, small, ggml_nbytes(&part));
    }
    return found[type];
}
