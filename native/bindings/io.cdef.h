typedef enum llmaas_io_kind { LLMAAS_IO_BEST, LLMAAS_IO_URING, LLMAAS_IO_THREADS, ... } llmaas_io_kind;
int llmaas_io_measure(
    llmaas_io_kind kind, int fd, uint64_t n_file, uint32_t n_bytes, uint32_t depth, double seconds, double * rate);
