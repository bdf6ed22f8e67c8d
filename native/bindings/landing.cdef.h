typedef struct llmaas_landing {
    uint8_t * first;
    uint64_t step;
    uint64_t n_bytes;
    uint64_t n_pieces;
} llmaas_landing;
