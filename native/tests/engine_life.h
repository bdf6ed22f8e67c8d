/* Shared by the parts of engine_life: see engine_life.c. */
#ifndef LLMAAS_ENGINE_LIFE_H
#define LLMAAS_ENGINE_LIFE_H

#include "check.h"

#include "llama.h"
#include "llmaas/engine.h"

enum { MAX_MODELS = 3, MAX_CONTEXTS = 4, N_SEQ = 2, N_CTX = 256, N_EMBD = 256, MAX_BATCH = 64, N_THREADS = 2 };

/* Claims on a model's matrices. */
enum { NOTHING = 0, PART = 1, TILES = 2, FROM_FILE = 4, CHANNELS = 8 };
enum { MAX_TENSORS = 64, MAX_CLAIMED = 32 };

typedef struct model {
    struct llama_model *        llama;
    struct llama_adapter_lora * adapter; /* NULL: no adapter fits */
    llmaas_weights *            weights; /* NULL: nothing is claimed */
    const char *                path;
    int                         claims;
    bool                        is_in_file[MAX_TENSORS]; /* in file order */
    char                        parts[MAX_CLAIMED][64]; /* weights of which a part is claimed */
    uint32_t                    n_parts;
    bool                        is_repacked; /* tiles always are; weights read from the file never are */
} model;

typedef struct context {
    struct llama_context *      llama;
    const model *               of;
    struct llama_context_params params;
    llmaas_engine *             engine; /* NULL: a vanilla context */
    llmaas_density *            density; /* subscribed, or NULL */
    llmaas_hidden_states *             states;
    bool                        has_adapter;
    int32_t                     level;
    int                         n_past[N_SEQ];
    llmaas_engine_stats         stats;
} context;

extern struct life {
    const char *        adapter;
    char **             paths;
    uint32_t            n_paths;
    model               models[MAX_MODELS];
    context             contexts[MAX_CONTEXTS];
    ggml_threadpool_t   pool;
    struct llama_batch  batch;
    uint64_t            n_compared, n_aborted, n_refused;
} life;

bool      one_in(uint32_t n);
model *   any_model(bool is_loaded);
context * any_context(bool is_open);

/* Return whether a claim put weights into our buffers: no vanilla context can use those. */
static inline bool owns_buffers(const model * m) { return m->claims & (TILES | FROM_FILE); }

/* Load `m->path` with `m->claims`. False if that is not possible now. */
bool load_model(model * m, bool is_stopped);
void unload_model(model * m);
void close_context(context * c);

/* Have one-token products use some columns of weights in a file. */
void add_channels(model * m);

/* Operations on whatever exists. Each returns false if it is not possible now. */
bool do_load(void);
bool do_unload(void);
bool do_open(void);
bool do_open_in_vain(void);
bool do_close(void);
bool do_switch(void);
bool do_listen(void);
bool do_read(void);
bool do_decode(void);
bool do_abort(void);
bool do_reset(void);
bool do_restore(void);
bool do_adapt(void);
bool do_compare(void);
bool do_budget(void);
bool do_exchange(void);

#endif
