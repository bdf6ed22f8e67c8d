/* A context's engine: the ggml backend that computes its graphs. */
#ifndef LLMAAS_ENGINE_INTERNAL_H
#define LLMAAS_ENGINE_INTERNAL_H

#include "biases.h"
#include "cells.h"
#include "forks.h"
#include "graph.h"
#include "narrow.h"
#include "prefix.h"
#include "room.h"
#include "taps.h"
#include "weights.h"

#include <pthread.h>
#include <stdatomic.h>

struct llmaas_engine {
    struct ggml_backend base; /* first, so that a ggml_backend_t is an engine; ggml takes it for a CPU backend */
    ggml_backend_t      cpu;  /* the CPU backend whose context `base` uses */
    llmaas_weights *    weights;
    atomic_int          level;
    atomic_bool         is_narrow, is_sparse;

    llmaas_fork_lock lock; /* held while a graph is computed: guards what follows */
    llmaas_taps     taps;
    llmaas_graph *  graph;
    llmaas_cells    cells;
    llmaas_room     room;
    llmaas_narrow   narrow;
    llmaas_biases   biases;
    llmaas_prefixes prefixes;

    char            failure[256]; /* why the last graph failed; empty: it did not */

    _Atomic uint64_t n_graphs, n_passed, n_products, n_taps, n_narrowed, n_cut;
};

/* A backend for llama.cpp: on `device`, or on ggml-cpu's own when `weights` all lie in buffers that this takes. */
llmaas_engine * llmaas_engine_new(ggml_backend_dev_t device, llmaas_weights * weights);

/* The thread pool that the next graph of this thread is to be computed on; NULL: ggml-cpu's own threads. */
void llmaas_engine_next_threadpool(ggml_threadpool_t pool);

/* Registering (registry.c): told when an engine is gone. */
void llmaas_engine_gone(const llmaas_engine * engine);
/* Whether this thread is creating the context of `engine`. */
bool llmaas_engine_in_creation(const llmaas_engine * engine);

#endif
