/* The engine's interface: a ggml backend that computes a context's graphs on ggml-cpu and lets plugins take part.
 *
 * libllmaas_ggml links by SONAME to the ggml that llama-cpp-python installed; load it after libllama. Calls are
 * thread-safe unless their comment says otherwise. */
#ifndef LLMAAS_ENGINE_H
#define LLMAAS_ENGINE_H

#include "llmaas/landing.h"
#include "llmaas/tap.h"

/* Return one sentence that says why the ggml in this process cannot be used, or NULL if it can. Every other function
 * here requires NULL. */
LLMAAS_API const char * llmaas_ggml_refusal(void);

/* -- weights ----------------------------------------------------------------------------------------------------- */

/* The claimed weights of one model. Reference-counted: whoever holds a reference releases it. */
typedef struct llmaas_weights llmaas_weights;

LLMAAS_API llmaas_weights * llmaas_weights_new(void);
LLMAAS_API void             llmaas_weights_release(llmaas_weights * weights);

/* Tensors of a GGUF file, in file order. llmaas_gguf_tensors() returns EINVAL if the file is missing or not a GGUF, and
 * ESPACE if out of memory. */
typedef struct llmaas_tensor_info {
    char     name[64];
    int32_t  type; /* enum ggml_type */
    int64_t  ne[3]; /* columns, rows (1 for a vector), matrices */
    uint64_t offset; /* of the tensor's bytes in the file */
    uint64_t n_bytes;
} llmaas_tensor_info;

LLMAAS_API llmaas_status llmaas_gguf_tensors(const char * path, llmaas_tensor_info ** infos, uint32_t * n);
LLMAAS_API void          llmaas_gguf_tensors_free(llmaas_tensor_info * infos);

/* Claim which part of a weight each level uses. extents[0..n_levels): rows (outputs) or columns (inputs), or
 * LLMAAS_ALL. Extents are rounded up to where the weight's layout can be cut. An extent of 0 makes products zero.
 * Levels beyond n_levels use the last extent. Call before any context of the model is created. EINVAL: n_levels is
 * outside 1..64, an extent is negative but not LLMAAS_ALL, or the part is already claimed. */
typedef enum llmaas_axis { LLMAAS_ROWS = 0, LLMAAS_COLUMNS = 1 } llmaas_axis;
#define LLMAAS_ALL (-1)
LLMAAS_API llmaas_status llmaas_weights_claim_part(
    llmaas_weights * weights, const char * name, llmaas_axis axis, const int64_t * extents, uint32_t n_levels);

/* Replace the extents of a claimed part for all contexts of the model, from the next graph on. Waits for graphs that
 * use the old extents. EINVAL: as for llmaas_weights_claim_part(), or no part of this weight is claimed. */
LLMAAS_API llmaas_status llmaas_weights_set_part(
    llmaas_weights * weights, const char * name, const int64_t * extents, uint32_t n_levels);

/* Add biases[level][row] to the products of a weight whose columns are claimed, whatever the extent. The biases are
 * copied; a row of zeros adds nothing. n_rows: rows of the weight. Call before any context of the model is created.
 * EINVAL: n_levels is outside 1..64, no columns are claimed, or the weight already has biases. ESPACE: out of
 * memory. */
LLMAAS_API llmaas_status llmaas_weights_claim_biases(
    llmaas_weights * weights, const char * name, const float * biases, uint32_t n_levels, uint32_t n_rows);

/* A low-rank term of a weight's products at one level: the first n_rows values get B (A x), with the first n_columns of
 * x. low_rank.h describes the matrices. */
typedef struct llmaas_adapter {
    uint32_t        rank; /* up to 64; 0: none at this level */
    uint32_t        n_columns, n_rows;
    const uint8_t * a;
    const uint8_t * b; /* transposed */
} llmaas_adapter;

/* Add adapters[level] to the products of a weight with a claimed part. Levels beyond n_levels use the last adapter. The
 * adapters are copied, and stay in memory. Call before any context of the model is created. EINVAL: n_levels is outside
 * 1..64, a rank is too large, no part is claimed, or the weight already has adapters. ESPACE: out of memory. */
LLMAAS_API llmaas_status llmaas_weights_claim_adapters(
    llmaas_weights * weights, const char * name, const llmaas_adapter * adapters, uint32_t n_levels);

/* Claim where a weight's bytes are, before the model is loaded. The weight must then be loaded into
 * llmaas_buffer_type().
 * tiles: separate copies in ggml-cpu's fastest layout, cut at the columns of the claimed part.
 * file: memory holds as much of the weight as llmaas_weights_set_memory() allows; the rest is read from `path` at
 * `offset` for each graph, ahead of its use. is_packed: the file has the output of llmaas_repack(), if that supports
 * the weight.
 * EINVAL: the source is already claimed. EIO: `path` cannot be opened (errno). ESPACE: out of memory. */
LLMAAS_API llmaas_status llmaas_weights_claim_tiles(llmaas_weights * weights, const char * name);
LLMAAS_API llmaas_status llmaas_weights_claim_file(
    llmaas_weights * weights, const char * name, const char * path, uint64_t offset, bool is_packed);

/* Claim a file from which each graph reads the rows that it looks up (embeddings). If the weight is also used in
 * products, first call llmaas_weights_claim_file() for it. Errors: as for llmaas_weights_claim_file(). */
LLMAAS_API llmaas_status llmaas_weights_claim_rows(
    llmaas_weights * weights, const char * name, const char * path, uint64_t offset);

/* Set how much memory the weights in files take. n_kept: bytes kept between graphs, 0 at first. n_arena: bytes of the
 * arena that the rest is read into; it always has room for at least two pieces. Predicted channels are read ahead into
 * another n_arena bytes. Excess memory is given back before the call returns, once the graph being computed is done.
 * With n_arena 0 the arena is also given back, until the next graph. When graphs need more compute memory than at the
 * time of this call, fewer bytes are kept. EINVAL: no weight is in a file. */
LLMAAS_API llmaas_status llmaas_weights_set_memory(llmaas_weights * weights, uint64_t n_kept, uint64_t n_arena);
/* Do the same unless a graph is being computed; then change nothing and return false. */
LLMAAS_API bool llmaas_weights_try_set_memory(llmaas_weights * weights, uint64_t n_kept, uint64_t n_arena);

/* Keep what graphs use at this level before everything else, from the next graph on; a negative level keeps nothing so.
 * Waits for the graph being computed. EINVAL: no weight is in a file. */
LLMAAS_API llmaas_status llmaas_weights_keep_level(llmaas_weights * weights, int32_t level);

/* How weights in files are read. */
typedef struct llmaas_reading {
    uint32_t depth;   /* most reads in flight, up to LLMAAS_IO_MAX_DEPTH; 0: 16, or 64 for channels read on demand */
    uint32_t n_bytes; /* largest read in bytes, a multiple of 4096 up to LLMAAS_MAX_READ_BYTES; 0: 1 MiB, or 256 KiB for
                       * channels read on demand. A longer channel is read in one piece */
    int32_t  n_gap;   /* longest gap in bytes that one read spans between channels read on demand; negative: 12 KiB */
} llmaas_reading;
#define LLMAAS_MAX_READ_BYTES (16u << 20)

/* Set how weights in files are read, from the next graph on. EINVAL: out of range, or no weight is in a file. ESPACE:
 * out of memory; the new setting then applies to some of the weights only. */
LLMAAS_API llmaas_status llmaas_weights_set_reading(llmaas_weights * weights, const llmaas_reading * reading);

typedef struct llmaas_stream_stats {
    uint64_t n_bytes;         /* bytes of the weights, or of their channels: all that tokens use */
    uint64_t n_kept, n_arena; /* bytes of memory */
    uint64_t n_least;         /* bytes of n_kept that the experts of one product need */
    uint64_t n_hits, n_misses; /* experts found in memory, and experts read, so far */
    uint64_t n_read;          /* bytes read so far */
    uint64_t n_wasted;        /* bytes of n_read that were read ahead but not used */
    uint64_t stalled_ns;      /* time that graphs waited for reads */
    uint64_t n_passing;       /* bytes of memory, besides the arena, that channels pass through */
    uint64_t n_channel_hits, n_channel_misses; /* active channels found in memory, and active channels not kept, so
                                                * far */
    uint64_t n_channel_preloads; /* channel misses that had been read ahead */
    uint64_t n_operands;      /* operands with channels in a file */
    uint64_t n_room;          /* bytes of the weights that may be kept without experts and channels */
    uint64_t n_first, n_first_kept; /* bytes of memory for what is kept before everything else, and those that it
                                     * holds now */
    uint64_t n_passes;        /* graphs so far, each of which passes through the weights */
    uint64_t n_spare, n_spare_kept; /* bytes of the weights that only prompts use, because tokens use their channels, and
                                     * those in memory: n_kept leaves them out */
    uint64_t n_spare_used;    /* bytes of such weights that graphs used so far: less than all if a level is narrow */
} llmaas_stream_stats;
/* Fill in the statistics; all 0 if no weights are in files or `weights` is NULL. */
LLMAAS_API void llmaas_weights_read_stats(llmaas_weights * weights, llmaas_stream_stats * stats);

/* Which channels stay in memory, and how the others are read. */
typedef enum llmaas_channel_cache {
    LLMAAS_CHANNELS_STREAMED = 0, /* a share, evenly spread over a token; all others are read ahead, used or not */
    LLMAAS_CHANNELS_BUSIEST  = 1, /* the first channels in the file; the others are read once a token turns out to use
                                   * them */
    LLMAAS_CHANNELS_RECENT   = 2, /* the most used of late; the others are read once a token turns out to use them */
} llmaas_channel_cache;

/* An activation that some weights in files read, and a file with the columns of those weights (sparse.h), channel by
 * channel. A token's largest values are multiplied with these columns. */
typedef struct llmaas_operand_spec {
    uint32_t         pool;       /* operands with the same pool and the same n_bytes share memory */
    uint32_t         n_channels; /* values of the activation; a multiple of 32 */
    uint32_t         n_bytes;    /* bytes of a channel: the columns of all its weights, one after another */
    uint64_t         offset;     /* of the first channel in the file */
    uint64_t         stride;     /* bytes from one channel to the next */
    const uint32_t * order;      /* [n_channels]: channel at each place in the file */
    llmaas_channel_cache cache;
    float            threshold;  /* values of at least this magnitude are used, unless n_top is set */
    uint32_t         n_top;      /* use this many of the largest values; 0: use the threshold */
    int32_t          predictor;  /* number of an operand; the channels it uses are read ahead for this one; negative:
                                  * none */
} llmaas_operand_spec;

/* State of a file as stat(2) reports it, with times in nanoseconds. */
typedef struct llmaas_file_stamp {
    uint64_t device, inode, n_bytes;
    int64_t  mtime_ns, ctime_ns;
} llmaas_file_stamp;

/* Add an operand. From the next graph on, products with one token read only the columns that are used, and keep the
 * most used ones. Products with several tokens are dense: their weights are read for each graph and never kept.
 * *operand: number of the new operand. EINVAL: no weights are in files, or the spec contradicts itself. (Streamed
 * channels must be contiguous and not predicted. Operands with the same predictor need as many channels as it has, in
 * the same order and in the same records of one file.) ESTALE: the file did not have this stamp when it was opened.
 * EIO, ESPACE: as for llmaas_weights_claim_file(). */
LLMAAS_API llmaas_status llmaas_weights_add_operand(
    llmaas_weights * weights, const char * path, const llmaas_file_stamp * stamp, const llmaas_operand_spec * spec,
    uint32_t * operand);

/* Declare that a loaded weight in a file reads that operand. Its column, n_bits per row, is at `offset` in each
 * channel. scales: F16 [n_channels / 32][n_scales]; n_scales: the weight's rows, rounded up to 128. mins: same shape,
 * or NULL. Both are copied. EINVAL: no such weight, a wrong shape, or the weight already has an operand. ESPACE: out of
 * memory. */
LLMAAS_API llmaas_status llmaas_weights_add_columns(
    llmaas_weights * weights, const char * name, uint32_t operand, uint32_t n_bits, uint64_t offset, uint32_t n_scales,
    const uint16_t * scales, const uint16_t * mins);

/* Return one sentence that names a weight whose claim cannot be met and says why, or NULL. The sentence is valid until
 * the next call. is_created: a context exists, so the products of its graphs are known too. If there is a problem, free
 * the context without using it. */
LLMAAS_API const char * llmaas_weights_problem(llmaas_weights * weights, bool is_created);

/* Return the ggml_backend_buffer_type_t for llama_model_tensor_buft_override. */
LLMAAS_API void * llmaas_buffer_type(void);

/* ggml-cpu's repacked layout on this processor. ne: columns, rows, matrices. */

/* Repack a weight's bytes; the size stays the same. EUNSUPPORTED: ggml-cpu does not repack such a weight. EINVAL: no
 * weight has this type and shape. */
LLMAAS_API llmaas_status llmaas_repack(int32_t type, const int64_t * ne, const void * plain, void * packed);
/* Return a number that identifies the layout; 0: ggml-cpu does not repack such a weight. */
LLMAAS_API uint64_t llmaas_repack_layout(int32_t type, const int64_t * ne);

/* -- around libllama's calls, on the thread that makes them ------------------------------------------------------ */

/* Add the backend to ggml's registry, or remove it; the calls are counted. The registry has no lock, so no other call
 * changes it. Meanwhile, other threads must announce their model loads and context creations (below). Removing waits
 * for announced calls on other threads. Existing engines keep working. */
LLMAAS_API void llmaas_register(void);
LLMAAS_API void llmaas_unregister(void);

/* Call around llama_model_load_from_file: tensors allocated in llmaas_buffer_type() belong to `weights`, which may be
 * NULL. model: the loaded model, or NULL. */
LLMAAS_API void llmaas_load_begin(llmaas_weights * weights);
LLMAAS_API void llmaas_load_end(const void * model);

/* Return whether a live model has weights in llmaas_buffer_type(). Only a context with an engine of these weights can
 * compute it; ggml ends the process in the creation of any other. */
LLMAAS_API bool llmaas_model_has_buffers(const void * model);

/* Call around llama_init_from_model, while the backend is registered: the context gets an engine, which lives as long
 * as the context. llmaas_create_end() returns NULL if no context was made. */
typedef struct llmaas_engine llmaas_engine;
LLMAAS_API void            llmaas_create_begin(llmaas_weights * weights);
LLMAAS_API llmaas_engine * llmaas_create_end(void);

/* -- a context's engine; valid until llama_free of its context --------------------------------------------------- */

/* Set or return the level: which extents of the claimed parts are used, from the next graph on. Initially 0. A negative
 * level uses every weight in full. */
LLMAAS_API void    llmaas_engine_set_level(llmaas_engine * engine, int32_t level);
LLMAAS_API int32_t llmaas_engine_level(const llmaas_engine * engine);

/* Set or return whether attention leaves out cells that no query of the graph can see, from the next graph on.
 * Initially false. */
LLMAAS_API void llmaas_engine_set_narrow(llmaas_engine * engine, bool is_narrow);
LLMAAS_API bool llmaas_engine_is_narrow(const llmaas_engine * engine);

/* Set or return whether one-token graphs multiply only the largest values with weights that have channels, from the
 * next graph on. Initially false. Other graphs multiply with every value. */
LLMAAS_API void llmaas_engine_set_sparse(llmaas_engine * engine, bool is_sparse);
LLMAAS_API bool llmaas_engine_is_sparse(const llmaas_engine * engine);

/* Set whether graphs are hidden from taps, from the next graph on. Initially false. */
LLMAAS_API void llmaas_engine_set_unobserved(llmaas_engine * engine, bool is_unobserved);

/* Add or remove a tap; wait for the graph being computed. The tap's struct is copied; `user` identifies it. ESPACE: 16
 * taps are subscribed. EINVAL: no tap has this `user`. */
LLMAAS_API llmaas_status llmaas_engine_subscribe(llmaas_engine * engine, const llmaas_tap * tap);
LLMAAS_API llmaas_status llmaas_engine_unsubscribe(llmaas_engine * engine, const void * user);

typedef struct llmaas_engine_stats {
    uint64_t n_graphs;   /* graphs given to ggml-cpu */
    uint64_t n_passed;   /* graphs given to ggml-cpu unchanged */
    uint64_t n_products; /* products replaced by products with a part of a weight, or with a weight kept elsewhere */
    uint64_t n_taps;     /* nodes that a tap read, with a step of its own or settled without one */
    uint64_t n_narrowed; /* attention nodes replaced by nodes over fewer cells, or dealt out to threads by heads */
    uint64_t n_cut;      /* nodes, products included, that were computed for the rows in use only, or not at all */
} llmaas_engine_stats;
LLMAAS_API void llmaas_engine_read_stats(const llmaas_engine * engine, llmaas_engine_stats * stats);

/* Return why the last graph failed, or NULL if it did not or the reason is unknown. Only the thread that had the graph
 * computed may ask, before it computes the next one. */
LLMAAS_API const char * llmaas_engine_failure(const llmaas_engine * engine);

/* Memory of the context's KV cells. All 0 if unknown: the cells lie in several buffers, or not on the host. */
typedef struct llmaas_cell_memory {
    uint32_t n_cells;
    uint64_t n_bytes;   /* bytes of all cells */
    uint64_t n_touched; /* bytes that may hold memory: all of n_bytes until the first release */
} llmaas_cell_memory;
LLMAAS_API llmaas_cell_memory llmaas_engine_cells(llmaas_engine * engine);

/* Give the memory of all cells back to the system. The cells then hold zeros, as in a new context, and take memory
 * again when written. No cell may be in use, and no graph may run. On an error nothing changes. EUNSUPPORTED: the
 * cells' place is unknown, or it is not private anonymous memory. EIO: the system refused. */
LLMAAS_API llmaas_status llmaas_engine_release_cells(llmaas_engine * engine);

/* Label cells as if a blob of n_bytes were loaded into them, but leave writing their bytes to the caller.
 * landings[0..n_landings) receives where the bytes belong: one landing for each K and V, in the blob's order.
 * `set_data` is llama_state_seq_set_data, `ctx` the engine's context; only headers of the blob are read. EUNSUPPORTED:
 * `set_data` refused, the cells are not in one buffer on the host, or they are not contiguous. Some cells may be
 * labeled then; remove the sequence. */
typedef size_t (* llmaas_set_data)(void * ctx, const uint8_t * blob, size_t n_bytes, int32_t sequence);
LLMAAS_API llmaas_status llmaas_engine_land(
    llmaas_engine * engine, llmaas_set_data set_data, void * ctx, int32_t sequence, const uint8_t * blob, uint64_t n_bytes,
    llmaas_landing * landings, uint32_t n_landings);

/* Return the bytes of compute buffers that are reserved but not yet written, and of copies of operands that larger graphs
 * need: the process can still grow by these. */
LLMAAS_API uint64_t llmaas_engine_untouched(llmaas_engine * engine);

/* Return how many engines exist, or whether the backend is registered with ggml now. */
LLMAAS_API uint32_t llmaas_engine_count(void);
LLMAAS_API bool     llmaas_backend_registered(void);

#endif
