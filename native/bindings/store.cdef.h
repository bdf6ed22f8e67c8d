#define LLMAAS_STORE_BLOCK ...

typedef struct llmaas_io_stats {
    uint64_t bytes;
    uint64_t n_calls;
    int32_t  sys_errno;
} llmaas_io_stats;

llmaas_status llmaas_store_read(
    int fd, uint32_t n, const uint64_t * offsets, const uint64_t * lengths, uint8_t * const * dst,
    const uint8_t (* keys)[32], bool is_ahead, int32_t * statuses, llmaas_io_stats * stats);
llmaas_status llmaas_store_write(
    int fd, uint32_t n, const uint64_t * offsets, const uint64_t * lengths, const uint8_t * const * src,
    llmaas_io_stats * stats);
llmaas_status llmaas_store_erase(
    int fd, uint32_t n, const uint64_t * offsets, const uint64_t * lengths, llmaas_io_stats * stats);
