// The API of libllmaas_ggml, for cffi; documented in include/llmaas/engine.h and tap.h.

typedef struct llmaas_weights llmaas_weights;
typedef struct llmaas_engine llmaas_engine;
typedef struct llmaas_density llmaas_density;
typedef struct llmaas_hidden_states llmaas_hidden_states;
typedef struct llmaas_magnitudes llmaas_magnitudes;
typedef struct llmaas_moments llmaas_moments;
typedef struct llmaas_overlap llmaas_overlap;

typedef struct llmaas_tensor_info {
    char name[64];
    int32_t type;
    int64_t ne[3];
    uint64_t offset;
    uint64_t n_bytes;
} llmaas_tensor_info;

typedef struct llmaas_engine_stats {
    uint64_t n_graphs;
    uint64_t n_passed;
    uint64_t n_products;
    uint64_t n_taps;
    uint64_t n_narrowed;
    uint64_t n_cut;
} llmaas_engine_stats;

typedef struct llmaas_cell_memory {
    uint32_t n_cells;
    uint64_t n_bytes;
    uint64_t n_touched;
} llmaas_cell_memory;

typedef size_t (* llmaas_set_data)(void * ctx, const uint8_t * blob, size_t n_bytes, int32_t sequence);

typedef struct llmaas_tap {
    void * user;
    ...;
} llmaas_tap;

const char * llmaas_ggml_refusal(void);
llmaas_weights * llmaas_weights_new(void);
void llmaas_weights_release(llmaas_weights * weights);
int llmaas_gguf_tensors(const char * path, llmaas_tensor_info ** infos, uint32_t * n);
void llmaas_gguf_tensors_free(llmaas_tensor_info * infos);
int llmaas_weights_claim_part(
    llmaas_weights * weights, const char * name, int axis, const int64_t * extents, uint32_t n_levels);
int llmaas_weights_set_part(
    llmaas_weights * weights, const char * name, const int64_t * extents, uint32_t n_levels);
int llmaas_weights_claim_biases(
    llmaas_weights * weights, const char * name, const float * biases, uint32_t n_levels, uint32_t n_rows);
typedef struct llmaas_adapter {
    uint32_t rank, n_columns, n_rows;
    const uint8_t * a;
    const uint8_t * b;
} llmaas_adapter;
int llmaas_weights_claim_adapters(
    llmaas_weights * weights, const char * name, const llmaas_adapter * adapters, uint32_t n_levels);
int llmaas_weights_claim_tiles(llmaas_weights * weights, const char * name);
int llmaas_weights_claim_file(llmaas_weights * weights, const char * name, const char * path, uint64_t offset, bool is_packed);
int llmaas_weights_claim_rows(llmaas_weights * weights, const char * name, const char * path, uint64_t offset);
int llmaas_repack(int32_t type, const int64_t * ne, const void * plain, void * packed);
uint64_t llmaas_repack_layout(int32_t type, const int64_t * ne);
int llmaas_weights_set_memory(llmaas_weights * weights, uint64_t n_kept, uint64_t n_arena);
bool llmaas_weights_try_set_memory(llmaas_weights * weights, uint64_t n_kept, uint64_t n_arena);
int llmaas_weights_keep_level(llmaas_weights * weights, int32_t level);
typedef struct llmaas_reading {
    uint32_t depth, n_bytes;
    int32_t n_gap;
} llmaas_reading;
int llmaas_weights_set_reading(llmaas_weights * weights, const llmaas_reading * reading);
typedef struct llmaas_stream_stats {
    uint64_t n_bytes, n_kept, n_arena, n_least, n_hits, n_misses, n_read, n_wasted, stalled_ns;
    uint64_t n_passing, n_channel_hits, n_channel_misses, n_channel_preloads, n_operands, n_room, n_first, n_first_kept;
    uint64_t n_passes, n_spare, n_spare_kept, n_spare_used;
} llmaas_stream_stats;
void llmaas_weights_read_stats(llmaas_weights * weights, llmaas_stream_stats * stats);
typedef struct llmaas_operand_spec {
    uint32_t pool, n_channels, n_bytes;
    uint64_t offset, stride;
    const uint32_t * order;
    int cache;
    float threshold;
    uint32_t n_top;
    int32_t predictor;
} llmaas_operand_spec;
typedef struct llmaas_file_stamp {
    uint64_t device, inode, n_bytes;
    int64_t mtime_ns, ctime_ns;
} llmaas_file_stamp;
int llmaas_weights_add_operand(
    llmaas_weights * weights, const char * path, const llmaas_file_stamp * stamp, const llmaas_operand_spec * spec,
    uint32_t * operand);
int llmaas_weights_add_columns(
    llmaas_weights * weights, const char * name, uint32_t operand, uint32_t n_bits, uint64_t offset, uint32_t n_scales,
    const uint16_t * scales, const uint16_t * mins);
uint64_t llmaas_engine_untouched(llmaas_engine * engine);
const char * llmaas_weights_problem(llmaas_weights * weights, bool is_created);
void * llmaas_buffer_type(void);
void llmaas_register(void);
void llmaas_unregister(void);
void llmaas_load_begin(llmaas_weights * weights);
void llmaas_load_end(const void * model);
bool llmaas_model_has_buffers(const void * model);
void llmaas_create_begin(llmaas_weights * weights);
llmaas_engine * llmaas_create_end(void);
void llmaas_engine_set_level(llmaas_engine * engine, int32_t level);
int32_t llmaas_engine_level(const llmaas_engine * engine);
void llmaas_engine_set_narrow(llmaas_engine * engine, bool is_narrow);
bool llmaas_engine_is_narrow(const llmaas_engine * engine);
void llmaas_engine_set_sparse(llmaas_engine * engine, bool is_sparse);
bool llmaas_engine_is_sparse(const llmaas_engine * engine);
void llmaas_engine_set_unobserved(llmaas_engine * engine, bool is_unobserved);
int llmaas_engine_subscribe(llmaas_engine * engine, const llmaas_tap * tap);
int llmaas_engine_unsubscribe(llmaas_engine * engine, const void * user);
const char * llmaas_engine_failure(const llmaas_engine * engine);
void llmaas_engine_read_stats(const llmaas_engine * engine, llmaas_engine_stats * stats);
llmaas_cell_memory llmaas_engine_cells(llmaas_engine * engine);
int llmaas_engine_release_cells(llmaas_engine * engine);
int llmaas_engine_land(
    llmaas_engine * engine, llmaas_set_data set_data, void * ctx, int32_t sequence, const uint8_t * blob, uint64_t n_bytes,
    llmaas_landing * landings, uint32_t n_landings);
uint32_t llmaas_engine_count(void);
bool llmaas_backend_registered(void);
llmaas_density * llmaas_density_new(uint32_t n_pos, uint32_t n_layer, uint32_t row_step, uint32_t layer_step);
void llmaas_density_free(llmaas_density * density);
llmaas_tap llmaas_density_tap(llmaas_density * density);
int llmaas_density_read(llmaas_density * density, uint32_t n, double * sums, uint64_t * counts);
int llmaas_density_take(llmaas_density * density, uint32_t n, double * sums, uint64_t * counts);
int llmaas_density_cells(llmaas_density * density, uint32_t n, int32_t * cells);
int llmaas_density_place(llmaas_density * density, uint32_t n_kept, uint32_t n, const int32_t * cells);
void llmaas_density_reset(llmaas_density * density);
llmaas_hidden_states * llmaas_hidden_states_new(int kind, int layer, uint32_t n_embd, uint32_t capacity);
void llmaas_hidden_states_free(llmaas_hidden_states * states);
llmaas_tap llmaas_hidden_states_tap(llmaas_hidden_states * states);
int llmaas_hidden_states_take(llmaas_hidden_states * states, uint32_t n, float * rows, uint32_t * n_taken, uint64_t * n_lost);
llmaas_magnitudes * llmaas_magnitudes_new(int kind, uint32_t n_layers, const uint32_t * n_channels);
void llmaas_magnitudes_free(llmaas_magnitudes * magnitudes);
llmaas_tap llmaas_magnitudes_tap(llmaas_magnitudes * magnitudes);
int llmaas_magnitudes_read(llmaas_magnitudes * magnitudes, int layer, uint64_t * counts, double * sums);
llmaas_moments * llmaas_moments_new(int kind, uint32_t n_layers, const uint32_t * n_channels);
void llmaas_moments_free(llmaas_moments * moments);
llmaas_tap llmaas_moments_tap(llmaas_moments * moments);
int llmaas_moments_read(llmaas_moments * moments, int layer, uint64_t * n_rows, double * sums, double * squares);
llmaas_overlap * llmaas_overlap_new(int kind, uint32_t n_layers, const uint32_t * n_channels, const int32_t * predictors, uint32_t n_thresholds, const float * thresholds);
void llmaas_overlap_free(llmaas_overlap * overlap);
llmaas_tap llmaas_overlap_tap(llmaas_overlap * overlap);
int llmaas_overlap_read(llmaas_overlap * overlap, int layer, uint64_t * used, uint64_t * both);
