/* The memory of KV cells. llama.cpp clears it when a context is made, which touches every page. A page that was given
 * back reads as zeros again, and costs nothing until something is written there. */
#include "attention/cells.h"

#include "base/pages.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* -- graphs -------------------------------------------------------------------------------------------------------- */

/* Return the key cache that a node views, as attention and position shifts do: [d, n_head, n_cells, n_stream]. */
static const struct ggml_tensor * viewed_keys(const struct ggml_tensor * node) {
    const struct ggml_tensor * root = llmaas_op_of(node) == LLMAAS_OP_VIEW ? node->view_src : NULL;
    return root && root->buffer && strncmp(root->name, "cache_k_l", 9) == 0 ? root : NULL;
}

static void learn(llmaas_cells * cells, const struct ggml_tensor * keys) {
    if (!cells->buffer) {
        cells->buffer    = keys->buffer;
        cells->is_whole  = true;
        cells->n_cells   = (uint32_t) keys->ne[1];
        cells->n_reached = cells->n_cells; /* llama.cpp cleared all cells */
    }
    if (keys->buffer != cells->buffer || keys->ne[1] != cells->n_cells || keys->ne[2] != 1) {
        cells->is_whole = false;
    }
}

void llmaas_cells_notice(llmaas_cells * cells, const struct ggml_cgraph * graph, bool is_creation) {
    int64_t n_graph = 0;
    for (int i = 0; i < graph->n_nodes; ++i) {
        const struct ggml_tensor * keys = viewed_keys(graph->nodes[i]);
        if (keys) {
            learn(cells, keys);
            n_graph = graph->nodes[i]->ne[2] > n_graph ? graph->nodes[i]->ne[2] : n_graph;
        }
    }
    if (n_graph > 0) {
        cells->n_graph = is_creation ? 0 : (uint32_t) n_graph; /* graphs of the creation are never computed */
    }
}

void llmaas_cells_reach(llmaas_cells * cells) {
    cells->n_reached = cells->n_graph > cells->n_reached ? cells->n_graph : cells->n_reached;
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

static llmaas_pages pages_of(const llmaas_cells * cells) {
    return llmaas_pages_in(ggml_backend_buffer_get_base(cells->buffer), ggml_backend_buffer_get_size(cells->buffer));
}

/* Return the bytes of the buffer that hold memory. */
static uint64_t count_resident(const llmaas_cells * cells) {
    uint64_t n_bytes;
    return llmaas_pages_resident(pages_of(cells), &n_bytes) ? n_bytes : ggml_backend_buffer_get_size(cells->buffer);
}

/* Return whether these addresses are private memory without a file behind it: only such pages read as zeros after they
 * were given back. */
static bool is_private_anonymous(llmaas_pages pages) {
    FILE * maps = fopen("/proc/self/maps", "re");
    if (!maps) {
        return false;
    }
    char *    line = NULL;
    size_t    room = 0;
    uintptr_t at   = pages.start;
    while (at < pages.end && getline(&line, &room, maps) >= 0) {
        unsigned long start = 0, end = 0, inode = 1;
        char          access[5] = "";
        if (sscanf(line, "%lx-%lx %4s %*x %*s %lu", &start, &end, access, &inode) == 4 && start <= at && at < end) {
            if (inode != 0 || strcmp(access, "rw-p") != 0) {
                break;
            }
            at = end;
        }
    }
    free(line);
    fclose(maps);
    return at >= pages.end;
}

/* Return the bytes in use, or a slightly higher estimate. Pages are counted only when graphs reach further cells; until
 * the next count, all reached cells may have been written. */
static uint64_t n_touched(llmaas_cells * cells, uint64_t n_bytes) {
    if (cells->n_reached == cells->n_cells) {
        return n_bytes;
    }
    if (cells->n_counted != cells->n_reached) {
        cells->n_resident = count_resident(cells);
        cells->n_counted  = cells->n_reached;
    }
    const uint64_t n_reached = n_bytes / cells->n_cells * cells->n_reached;
    return cells->n_resident > n_reached ? cells->n_resident : n_reached;
}

llmaas_cell_memory llmaas_cells_memory(llmaas_cells * cells) {
    if (!cells->buffer || !cells->is_whole || !ggml_backend_buffer_is_host(cells->buffer)) {
        return (llmaas_cell_memory) {0};
    }
    const uint64_t n_bytes = ggml_backend_buffer_get_size(cells->buffer);
    return (llmaas_cell_memory) {cells->n_cells, n_bytes, n_touched(cells, n_bytes)};
}

llmaas_status llmaas_cells_release(llmaas_cells * cells) {
    if (!cells->buffer || !cells->is_whole || !ggml_backend_buffer_is_host(cells->buffer)) {
        return LLMAAS_EUNSUPPORTED;
    }
    const llmaas_pages pages = pages_of(cells);
    if (!is_private_anonymous(pages)) {
        return LLMAAS_EUNSUPPORTED;
    }
    if (!llmaas_pages_release(pages)) {
        return LLMAAS_EIO; /* for example, the memory is locked */
    }
    if (pages.start < pages.end) { /* with huge pages, a few cells of each layer would touch far too much */
        (void) madvise((void *) pages.start, pages.end - pages.start, MADV_NOHUGEPAGE);
    }
    cells->n_reached = cells->n_counted = 0; /* n_graph stays: llama.cpp may reuse its last graph */
    cells->n_resident = 0;
    return LLMAAS_OK;
}
