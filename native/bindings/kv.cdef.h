#define LLMAAS_KV_MAX_LAYERS ...
#define LLMAAS_KV_MAX_ROW ...

typedef struct llmaas_kv_geom {
    uint32_t n_layer;
    uint32_t v_trans;
    int32_t  type_k;
    int32_t  type_v;
    const uint64_t * k_row;
    const uint64_t * v_row;
    uint32_t n_first;
} llmaas_kv_geom;

typedef struct llmaas_blob_info {
    uint32_t n_layer;
    uint32_t v_trans;
    int32_t  type_k;
    int32_t  type_v;
    uint32_t n_cells;
    uint32_t n_first;
} llmaas_blob_info;

llmaas_status llmaas_kv_geom_check(const llmaas_kv_geom * geom);
uint64_t llmaas_kv_geom_hash(const llmaas_kv_geom * geom);
size_t llmaas_blob_size(const llmaas_kv_geom * geom, uint32_t n_cells);
llmaas_status llmaas_blob_init(
    const llmaas_kv_geom * geom, uint8_t * blob, size_t size, const int32_t * pos, uint32_t n_cells);
llmaas_status llmaas_blob_check(
    const llmaas_kv_geom * geom, const uint8_t * blob, size_t size, const int32_t * pos, uint32_t n_cells);
llmaas_status llmaas_blob_sort(const llmaas_kv_geom * geom, uint8_t * blob, size_t size, uint32_t n_cells);
llmaas_status llmaas_blob_probe(
    const uint8_t * blob, size_t size, uint32_t max_layers, llmaas_blob_info * info, uint64_t * k_row, uint64_t * v_row);
llmaas_status llmaas_blob_positions(const uint8_t * blob, size_t size, int32_t * pos, uint32_t n_cells);
