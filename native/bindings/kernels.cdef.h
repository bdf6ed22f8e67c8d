const char * llmaas_kernels_name(void);
llmaas_status llmaas_kernels_select(const char * name);
uint32_t llmaas_crc32c(uint32_t crc, const uint8_t * data, size_t n);
