#include "engine/compute_buffer.h"

#include "ggml-cpu.h"

#include <stdlib.h>

enum { MIN_RELEASED = 4 << 20 }; /* giving back less is not worth the page faults when it is needed again */

static bool is_known(const llmaas_compute_buffers * compute, ggml_backend_buffer_t buffer) {
    for (int i = 0; i < compute->n_buffers; i++) {
        if (compute->buffers[i] == buffer) {
            return true;
        }
    }
    return false;
}

void llmaas_compute_buffers_init(llmaas_compute_buffers * compute) {
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        const enum ggml_backend_dev_type type = ggml_backend_dev_type(ggml_backend_dev_get(i));
        compute->has_gpu = compute->has_gpu || type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
    }
}

void llmaas_compute_buffers_forget(llmaas_compute_buffers * compute) { compute->n_buffers = 0; }

bool llmaas_compute_buffers_notice(llmaas_compute_buffers * compute, const struct ggml_cgraph * graph) {
    if (compute->n_buffers > 0) { /* a reused graph stays where it is */
        return false;
    }
    for (int i = 0; i < graph->n_nodes && compute->n_buffers < LLMAAS_MAX_COMPUTE_BUFFERS; i++) {
        const ggml_backend_buffer_t buffer = graph->nodes[i]->buffer;
        if (buffer && !is_known(compute, buffer)) {
            const int n = compute->n_buffers++;
            compute->buffers[n] = buffer;
            compute->pages[n] = llmaas_pages_in(ggml_backend_buffer_get_base(buffer), ggml_backend_buffer_get_size(buffer));
        }
    }
    return true;
}

/* -- the copy of an operand ---------------------------------------------------------------------------------------- */

/* A plan of ggml's, which may be longer in another release: only its first member is read. */
typedef struct plan {
    size_t work_size;
    char   rest[248];
} plan;

/* Return the bytes of the memory in which ggml-cpu converts operands for products, one at a time: scores of attention as
 * F16 above all. The number of threads hardly matters. */
static uint64_t work_of(const struct ggml_cgraph * graph) {
    plan (*make)(const struct ggml_cgraph *, int, ggml_threadpool_t) =
        (plan (*)(const struct ggml_cgraph *, int, ggml_threadpool_t)) (void (*)(void)) ggml_graph_plan;
    return make(graph, 1, NULL).work_size;
}

void llmaas_compute_buffers_reserve(llmaas_compute_buffers * compute, const struct ggml_cgraph * graph) {
    const uint64_t n_work = work_of(graph);
    compute->n_work_most  = n_work > compute->n_work_most ? n_work : compute->n_work_most;
}

/* -- fitting memory to a graph ----------------------------------------------------------------------------------- */

/* States of a page; may be combined. */
enum { IS_THERE = 1, IS_NEEDED = 2 };

static void need(unsigned char * states, llmaas_pages pages, ggml_backend_buffer_t buffer, const struct ggml_tensor * tensor) {
    const uintptr_t first = (uintptr_t) tensor->data, end = first + ggml_nbytes(tensor);
    if (tensor->buffer != buffer || first >= pages.end || end <= pages.start) {
        return;
    }
    const uintptr_t page = llmaas_page_size();
    const uintptr_t last = end < pages.end ? end - 1 : pages.end - 1;
    for (uintptr_t i = first < pages.start ? 0 : (first - pages.start) / page; i <= (last - pages.start) / page; i++) {
        states[i] |= IS_NEEDED;
    }
}

/* Mark what a graph reads as well as what it writes: its inputs are already there. */
static void need_all(
    unsigned char * states, llmaas_pages pages, ggml_backend_buffer_t buffer, const struct ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        need(states, pages, buffer, graph->nodes[i]);
        for (int j = 0; j < GGML_MAX_SRC && graph->nodes[i]->src[j]; j++) {
            need(states, pages, buffer, graph->nodes[i]->src[j]);
        }
    }
}

static uint64_t count(const unsigned char * states, size_t n, unsigned char state) {
    uint64_t found = 0;
    for (size_t i = 0; i < n; i++) {
        found += states[i] == state;
    }
    return found * llmaas_page_size();
}

static void give_back(const unsigned char * states, llmaas_pages pages) {
    const uintptr_t page = llmaas_page_size();
    const size_t    n    = (pages.end - pages.start) / page;
    for (size_t i = 0, end; i < n; i = end + 1) {
        for (end = i; end < n && !(states[end] & IS_NEEDED); end++) {
        }
        llmaas_pages_release((llmaas_pages) {pages.start + i * page, pages.start + end * page});
    }
}

static int64_t fit(llmaas_pages pages, ggml_backend_buffer_t buffer, const struct ggml_cgraph * graph) {
    const size_t    n      = (pages.end - pages.start) / llmaas_page_size();
    unsigned char * states = calloc(n ? n : 1, 1);
    uint64_t        n_more = 0, n_idle = 0;
    if (states && llmaas_pages_states(pages, states)) {
        need_all(states, pages, buffer, graph);
        n_more = count(states, n, IS_NEEDED);
        n_idle = count(states, n, IS_THERE);
    }
    if (n_idle >= MIN_RELEASED) {
        give_back(states, pages);
    }
    free(states);
    return (int64_t) n_more - (n_idle >= MIN_RELEASED ? (int64_t) n_idle : 0);
}

/* Return whether this is the last of the graphs that llama.cpp's graph was split into: earlier ones may still leave
 * data for later ones. */
static bool is_last(const llmaas_compute_buffers * compute, const struct ggml_cgraph * graph) {
    return !compute->has_gpu && graph->n_nodes > 0 && graph->nodes[graph->n_nodes - 1]->flags & GGML_TENSOR_FLAG_OUTPUT;
}

int64_t llmaas_compute_buffers_fit(llmaas_compute_buffers * compute, const struct ggml_cgraph * graph) {
    const uint64_t n_work = work_of(graph), n_before = compute->n_work;
    compute->n_work = n_work > n_before ? n_work : n_before; /* ggml-cpu keeps it until it needs a larger one */
    int64_t n_more  = (int64_t) (compute->n_work - n_before);
    for (int i = 0, n = is_last(compute, graph) ? compute->n_buffers : 0; i < n; i++) {
        if (ggml_backend_buffer_get_usage(compute->buffers[i]) == GGML_BACKEND_BUFFER_USAGE_COMPUTE) { /* not KV cells */
            n_more += fit(compute->pages[i], compute->buffers[i], graph);
        }
    }
    return n_more;
}

uint64_t llmaas_compute_buffers_untouched(const llmaas_compute_buffers * compute) {
    uint64_t n = compute->n_work_most > compute->n_work ? compute->n_work_most - compute->n_work : 0, n_resident;
    for (int i = 0; i < compute->n_buffers; i++) {
        const llmaas_pages pages = compute->pages[i];
        n += llmaas_pages_resident(pages, &n_resident) ? pages.end - pages.start - n_resident : 0;
    }
    return n;
}
