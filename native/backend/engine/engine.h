/* A context's engine: the ggml backend that computes its graphs. */
#ifndef LLMAAS_ENGINE_INTERNAL_H
#define LLMAAS_ENGINE_INTERNAL_H

#include "attention/cells.h"
#include "attention/narrow.h"
#include "base/fork_lock.h"
#include "base/graph.h"
#include "engine/compute_buffer.h"
#include "taps/taps.h"
#include "weights/biases.h"
#include "weights/pruning.h"
#include "weights/weights.h"

#include <pthread.h>
#include <stdatomic.h>

struct llmaas_engine {
    struct ggml_backend base; /* first, so that a ggml_backend_t is an engine; ggml treats it as a CPU backend */
    ggml_backend_t      cpu;  /* the CPU backend whose context `base` uses */
    llmaas_weights *    weights;
    atomic_int          level;
    atomic_bool         is_narrow, is_sparse, is_unobserved;

    llmaas_fork_lock lock; /* held while a graph is computed; guards the members below */
    llmaas_taps     taps;
    llmaas_graph *  graph;
    llmaas_cells    cells;
    llmaas_narrow   narrow;
    llmaas_biases   biases;
    llmaas_pruning  pruning;
    llmaas_compute_buffers compute_buffers;

    char            failure[256]; /* why the last graph failed; empty if it did not */

    _Atomic uint64_t n_graphs, n_passed, n_products, n_taps, n_narrowed, n_cut;
};

/* Create a backend for llama.cpp on ggml-cpu's own device, or on `device` if `weights` need our buffers. */
llmaas_engine * llmaas_engine_new(ggml_backend_dev_t device, llmaas_weights * weights);

/* Set the thread pool for the next graph of this thread; NULL: ggml-cpu's own threads. */
void llmaas_engine_next_threadpool(ggml_threadpool_t pool);

/* Tell the registry (registry.c) that an engine is gone. */
void llmaas_engine_gone(const llmaas_engine * engine);
/* Return whether this thread is creating the context of `engine`. */
bool llmaas_engine_in_creation(const llmaas_engine * engine);

#endif
