/* Shared by the parts of engine_threads: see engine_threads.c. */
#ifndef LLMAAS_ENGINE_THREADS_H
#define LLMAAS_ENGINE_THREADS_H

#include "check.h"

#include "ggml-backend.h"
#include "llmaas/engine.h"

enum { N_LAYER = 2, D = 128, FF = 256, HEAD = 32, N_HEAD = 4, N_HEAD_KV = 2, D_KV = HEAD * N_HEAD_KV, N_OUT = 96 };
enum { N_CTX = 64, N_GRAPH = 512 };

typedef enum weight_kind { ATTN_NORM, Q, K, V, OUT, FFN_NORM, GATE, UP, DOWN, N_KINDS } weight_kind;

/* Where the feed-forward weights are: repacked by ggml-cpu, in tiles, or in a file. */
typedef enum model_kind { REPACKED, TILED, ON_DISK } model_kind;

typedef struct model {
    model_kind            kind;
    llmaas_weights *      weights;
    struct ggml_context * plain_ctx, * special_ctx;
    ggml_backend_buffer_t plain_buffer, special_buffer;
    struct ggml_tensor *  tensors[N_LAYER][N_KINDS];
    struct ggml_tensor *  norm, * output;
    char                  path[32];
} model;

struct ggml_context * new_context(size_t n_tensors);
void                  load_model(model * m, model_kind kind);
void                  unload_model(model * m);

typedef struct context {
    const model *         of;
    bool                  is_flash;
    ggml_backend_t        backends[2]; /* the engine or a plain backend, and a CPU backend as llama.cpp's fallback */
    ggml_backend_sched_t  sched;
    ggml_threadpool_t     pool; /* NULL: ggml-cpu's own threads */
    struct ggml_context * cache_ctx;
    ggml_backend_buffer_t cache_buffer;
    struct ggml_tensor *  k[N_LAYER], * v[N_LAYER];
} context;

/* Open a context on `first`, and let ggml see its graph. variant & 1: flash attention; & 2: its own thread pool. */
void            open_context(context * c, const model * m, ggml_backend_t first, uint64_t variant);
llmaas_engine * create_context(context * c, const model * m, uint64_t variant); /* on an engine */
void            close_context(context * c);

/* Evaluate a prompt, then some tokens one by one; store the last token's results in `results`. */
void generate(context * c, float * results);

#endif
