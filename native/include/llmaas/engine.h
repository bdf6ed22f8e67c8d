/* The engine-side hook point: a ggml backend that computes a context's graphs on ggml-cpu, and lets plugins take part.
 *
 * libllmaas_ggml links to the ggml that llama-cpp-python installed, by SONAME; load it after libllama. Unless said
 * otherwise calls are thread-safe. */
#ifndef LLMAAS_ENGINE_H
#define LLMAAS_ENGINE_H

#include "llmaas/landing.h"
#include "llmaas/tap.h"

/* Why the ggml in this process cannot be used, as one sentence; NULL: it can. Everything below needs that. */
LLMAAS_API const char * llmaas_ggml_refusal(void);

/* -- weights ----------------------------------------------------------------------------------------------------- */

/* The claimed weights of one model. Counted: whoever holds one releases it. */
typedef struct llmaas_weights llmaas_weights;

LLMAAS_API llmaas_weights * llmaas_weights_new(void);
LLMAAS_API void             llmaas_weights_release(llmaas_weights * weights);

/* Tensors of a GGUF file, in file order. EINVAL: no such file, or not a GGUF. ESPACE: out of memory. */
typedef struct llmaas_tensor_info {
    char     name[64];
    int32_t  type; /* enum ggml_type */
    int64_t  ne[3]; /* columns, rows (1: a vector), matrices */
    uint64_t offset; /* of its bytes in the file */
    uint64_t n_bytes;
} llmaas_tensor_info;

LLMAAS_API llmaas_status llmaas_gguf_tensors(const char * path, llmaas_tensor_info ** infos, uint32_t * n);
LLMAAS_API void          llmaas_gguf_tensors_free(llmaas_tensor_info * infos);

/* Claim the part of a weight that is used, per level: extents[0..n_levels) rows (outputs) or columns (inputs), or LLMAAS_ALL;
 * with 0 products are zeros. Rounded up to what the weight's layout can be cut at. A level beyond n_levels uses the last one.
 * Before any context of the model is created. EINVAL: n_levels outside 1..64, another extent below 0, or the part is claimed
 * already. */
typedef enum llmaas_axis { LLMAAS_ROWS = 0, LLMAAS_COLUMNS = 1 } llmaas_axis;
#define LLMAAS_ALL (-1)
LLMAAS_API llmaas_status llmaas_weights_claim_part(
    llmaas_weights * weights, const char * name, llmaas_axis axis, const int64_t * extents, uint32_t n_levels);

/* Exchange the extents of a claimed part, for all contexts of the model, from the next graph on; waits for those that use
 * them. EINVAL: as above, or no part of this weight is claimed. */
LLMAAS_API llmaas_status llmaas_weights_set_part(
    llmaas_weights * weights, const char * name, const int64_t * extents, uint32_t n_levels);

/* Have biases[level][row] added to the products of a weight of which columns are claimed, whatever their extent; copied. A row of
 * zeros adds nothing. Before any context of the model is created. n_rows: of the weight. EINVAL: n_levels outside 1..64, no
 * columns are claimed, or there are biases already. ESPACE: out of memory. */
LLMAAS_API llmaas_status llmaas_weights_claim_biases(
    llmaas_weights * weights, const char * name, const float * biases, uint32_t n_levels, uint32_t n_rows);

/* Claim where a weight's bytes are, before the model is loaded. Such a weight must be loaded into
 * llmaas_buffer_type(). EINVAL: the source is claimed already.
 * EIO: `path` cannot be opened (errno). ESPACE: out of memory.
 * tiles: own copies in ggml-cpu's fastest layout, cut at the columns of the claimed part.
 * file: in memory as far as llmaas_weights_set_memory() allows; the rest is read from `path` at `offset` for each graph,
 * ahead of its use. is_packed: the bytes there are what llmaas_repack() makes of the weight's, if it takes the weight. */
LLMAAS_API llmaas_status llmaas_weights_claim_tiles(llmaas_weights * weights, const char * name);
LLMAAS_API llmaas_status llmaas_weights_claim_file(
    llmaas_weights * weights, const char * name, const char * path, uint64_t offset, bool is_packed);

/* Claim where rows of a weight that graphs look up (embeddings) are read, for each graph those that it asks for. For one that is
 * multiplied with as well claim a file for that first. Errors as above. */
LLMAAS_API llmaas_status llmaas_weights_claim_rows(
    llmaas_weights * weights, const char * name, const char * path, uint64_t offset);

/* How much memory the weights in files take: bytes of what is kept, 0 at first, and of the arena that the rest is read to, at
 * least two of the pieces it is read in; channels that are predicted are read ahead to as much again. What is more is given back
 * before it returns, after the graph being computed; with n_arena 0 the arena is, too, until the next graph.
 * While graphs compute in more memory than at the time of this call, fewer are kept. EINVAL: none is in a file. */
LLMAAS_API llmaas_status llmaas_weights_set_memory(llmaas_weights * weights, uint64_t n_kept, uint64_t n_arena);
/* The same, unless a graph is being computed: false then, and nothing was changed. */
LLMAAS_API bool llmaas_weights_try_set_memory(llmaas_weights * weights, uint64_t n_kept, uint64_t n_arena);

/* How weights in files are read. */
typedef struct llmaas_reading {
    uint32_t depth;   /* reads under way at most, up to LLMAAS_IO_MAX_DEPTH; 0: 16, and 64 of channels that are read on demand */
    uint32_t n_bytes; /* of a read at most, up to LLMAAS_MAX_READ_BYTES and a multiple of 4096; 0: 1 MiB, and 256 KiB of such
                       * channels. One that is longer is read as a whole */
    int32_t  n_gap;   /* bytes between two such channels that are read along rather than left out; below 0: 12 KiB */
} llmaas_reading;
#define LLMAAS_MAX_READ_BYTES (16u << 20)

/* From the next graph on. EINVAL: out of range, or none is in a file. ESPACE: out of memory; some are read so then. */
LLMAAS_API llmaas_status llmaas_weights_set_reading(llmaas_weights * weights, const llmaas_reading * reading);

typedef struct llmaas_stream_stats {
    uint64_t n_bytes;         /* of the weights, or of their channels: what may be kept */
    uint64_t n_kept, n_arena; /* of memory */
    uint64_t n_least;         /* of n_kept, what the experts of one product take */
    uint64_t n_hits, n_misses; /* experts that were there, and that had to be read, so far */
    uint64_t n_read;          /* bytes so far */
    uint64_t n_wasted;        /* of them, read ahead in vain */
    uint64_t stalled_ns;      /* that graphs waited for reads */
    uint64_t n_passing;       /* of memory, beside the arena, that channels pass through */
    uint64_t n_channel_hits, n_channel_misses; /* active channels that were kept, and that had to be read, so far */
    uint64_t n_channel_preloads; /* of the latter, those that had been read ahead */
    uint64_t n_operands;      /* whose channels tokens are multiplied with */
} llmaas_stream_stats;
/* All 0: no weights are in files, or `weights` is NULL. */
LLMAAS_API void llmaas_weights_read_stats(llmaas_weights * weights, llmaas_stream_stats * stats);

/* Which channels stay in memory, and how others are read. */
typedef enum llmaas_channel_cache {
    LLMAAS_CHANNELS_STREAMED = 0, /* some, evenly spread over a token; all others are read ahead, whether they are used or not */
    LLMAAS_CHANNELS_BUSIEST  = 1, /* the first ones in the file; others are read when they turn out to be used */
    LLMAAS_CHANNELS_RECENT   = 2, /* those used most often of late; others likewise */
} llmaas_channel_cache;

/* An activation that some weights in files read, and a file that has their columns (sparse.h), channel by channel: what a
 * token's largest values are multiplied with. */
typedef struct llmaas_operand_spec {
    uint32_t         pool;       /* operands of one pool, and with channels of one size, share memory */
    uint32_t         n_channels; /* values of the activation; a multiple of 32 */
    uint32_t         n_bytes;    /* of a channel: the columns of all its weights, behind each other */
    uint64_t         offset;     /* in the file, of the first channel */
    uint64_t         stride;     /* from one to the next */
    const uint32_t * order;      /* [n_channels]: which channel is where */
    llmaas_channel_cache cache;
    float            threshold;  /* a value is used from this size on; unless */
    uint32_t         n_top;      /* so many are: the largest */
    int32_t          predictor;  /* number of an operand: channels that it uses are read ahead for this one; below 0: none */
} llmaas_operand_spec;

/* Products with one token read only the columns that are used, and keep those that are used most; from the next graph on.
 * Products with several tokens are dense: read for each graph, never kept. *operand: its number. EINVAL: the spec contradicts
 * itself (streamed channels lie side by side, and are not predicted; those that one operand predicts are as many as its own, in
 * the same order and in the same records), or no weights are in files. EIO, ESPACE: as llmaas_weights_claim_file(). */
LLMAAS_API llmaas_status llmaas_weights_add_operand(
    llmaas_weights * weights, const char * path, const llmaas_operand_spec * spec, uint32_t * operand);

/* A loaded weight in a file reads that operand; `offset` of each channel has its column, of n_bits a row. scales: F16
 * [n_channels / 32][n_scales], copied, as are mins, unless NULL; n_scales: its rows, rounded up to 128. EINVAL: it is no such
 * weight, has another shape, or an operand already. ESPACE: out of memory. */
LLMAAS_API llmaas_status llmaas_weights_add_columns(
    llmaas_weights * weights, const char * name, uint32_t operand, uint32_t n_bits, uint64_t offset, uint32_t n_scales,
    const uint16_t * scales, const uint16_t * mins);

/* What keeps a claim from being met: a weight's name and why, as one sentence that is valid until the next call; NULL:
 * nothing. is_created: a context was created, so what its graphs multiply is known, too. A context of a model that has a
 * problem must be freed without being used. */
LLMAAS_API const char * llmaas_weights_problem(llmaas_weights * weights, bool is_created);

/* The ggml_backend_buffer_type_t for llama_model_tensor_buft_override. */
LLMAAS_API void * llmaas_buffer_type(void);

/* ggml-cpu's repacked layout on this processor. ne: columns, rows, matrices. */

/* Repack a weight's bytes, as many as they are. EUNSUPPORTED: ggml-cpu leaves such a weight as it is. EINVAL: there is none. */
LLMAAS_API llmaas_status llmaas_repack(int32_t type, const int64_t * ne, const void * plain, void * packed);
/* A number that differs where the layout does; 0: such a weight is not repacked. */
LLMAAS_API uint64_t llmaas_repack_layout(int32_t type, const int64_t * ne);

/* -- around libllama's calls, on the thread that makes them ------------------------------------------------------ */

/* Add the backend to ggml's registry, and remove it; they are counted. The registry has no lock, so no other call changes it,
 * and no other thread may load models or make contexts meanwhile unannounced. Removing waits for announced calls on other
 * threads. Engines that are left go on. */
LLMAAS_API void llmaas_register(void);
LLMAAS_API void llmaas_unregister(void);

/* Around llama_model_load_from_file: tensors that are allocated in llmaas_buffer_type() belong to `weights`, which may be
 * NULL. */
LLMAAS_API void llmaas_load_begin(llmaas_weights * weights);
LLMAAS_API void llmaas_load_end(void);

/* Around llama_init_from_model, while the backend is registered: the context gets an engine. It lives as long as the context;
 * NULL: no context was made. */
typedef struct llmaas_engine llmaas_engine;
LLMAAS_API void            llmaas_create_begin(llmaas_weights * weights);
LLMAAS_API llmaas_engine * llmaas_create_end(void);

/* -- a context's engine; valid until llama_free of its context --------------------------------------------------- */

/* Which extents of the claimed parts are used, from the next graph on. 0 at first; below 0: every part is all. */
LLMAAS_API void    llmaas_engine_set_level(llmaas_engine * engine, int32_t level);
LLMAAS_API int32_t llmaas_engine_level(const llmaas_engine * engine);

/* Whether attention leaves out cells that no query of the graph can see, from the next graph on; false at first. */
LLMAAS_API void llmaas_engine_set_narrow(llmaas_engine * engine, bool is_narrow);
LLMAAS_API bool llmaas_engine_is_narrow(const llmaas_engine * engine);

/* Whether graphs of one token multiply weights that have channels with the largest values only; false at first. From the next
 * graph on. Others multiply with every value. */
LLMAAS_API void llmaas_engine_set_sparse(llmaas_engine * engine, bool is_sparse);
LLMAAS_API bool llmaas_engine_is_sparse(const llmaas_engine * engine);

/* Add or remove a tap; waits for the graph being computed. The tap's struct is copied; `user` identifies it.
 * ESPACE: 16 are subscribed. EINVAL: remove found none. */
LLMAAS_API llmaas_status llmaas_engine_subscribe(llmaas_engine * engine, const llmaas_tap * tap);
LLMAAS_API llmaas_status llmaas_engine_unsubscribe(llmaas_engine * engine, const void * user);

typedef struct llmaas_engine_stats {
    uint64_t n_graphs;   /* given to ggml-cpu */
    uint64_t n_passed;   /* of them, as they were */
    uint64_t n_products; /* exchanged for products with a part of a weight, or with one from elsewhere */
    uint64_t n_taps;     /* nodes that a tap had, with a step of its own or settled without */
    uint64_t n_narrowed; /* attention nodes of layers, exchanged for others over fewer cells, or by heads */
    uint64_t n_cut;      /* nodes that were computed for the rows in use only, or not at all, products with these among them */
} llmaas_engine_stats;
LLMAAS_API void llmaas_engine_read_stats(const llmaas_engine * engine, llmaas_engine_stats * stats);

/* Why the last graph failed, for the thread that had it computed and until it has the next one; NULL: it did not, or nobody knows. */
LLMAAS_API const char * llmaas_engine_failure(const llmaas_engine * engine);

/* Memory of the context's KV cells. All 0: nobody knows, as they lie in several buffers, or not on the host. */
typedef struct llmaas_cell_memory {
    uint32_t n_cells;
    uint64_t n_bytes;   /* of all cells */
    uint64_t n_touched; /* of them, those that may hold memory: all, until they are released for the first time */
} llmaas_cell_memory;
LLMAAS_API llmaas_cell_memory llmaas_engine_cells(llmaas_engine * engine);

/* Give the memory of all cells back to the system: they hold zeros then, as when the context was made, and cost memory
 * again as they are written to. No cell may be in use, and no graph run. EUNSUPPORTED: nobody knows where they are, or
 * it is not private anonymous memory. EIO: the system refused. Nothing was changed then. */
LLMAAS_API llmaas_status llmaas_engine_release_cells(llmaas_engine * engine);

/* Label cells as those that a blob of n_bytes is loaded into, but leave their bytes to the caller: landings[0..n_landings)
 * says where they belong, one for each K and V in the blob's order. `set_data` is llama_state_seq_set_data, `ctx` the
 * engine's context; of the blob only headers are read. EUNSUPPORTED: `set_data` refused, the cells are not in one buffer on
 * the host, or not in a row. Some may be labelled then: remove the sequence. */
typedef size_t (* llmaas_set_data)(void * ctx, const uint8_t * blob, size_t n_bytes, int32_t sequence);
LLMAAS_API llmaas_status llmaas_engine_land(
    llmaas_engine * engine, llmaas_set_data set_data, void * ctx, int32_t sequence, const uint8_t * blob, uint64_t n_bytes,
    llmaas_landing * landings, uint32_t n_landings);

/* Memory for what its graphs compute that was reserved, but not written to yet: bytes that the process still grows by. */
LLMAAS_API uint64_t llmaas_engine_untouched(llmaas_engine * engine);

/* How many engines exist, and whether the backend is registered with ggml now. */
LLMAAS_API uint32_t llmaas_engine_count(void);
LLMAAS_API bool     llmaas_backend_registered(void);

#endif
