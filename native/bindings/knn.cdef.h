#define LLMAAS_KNN_MAX_DIMS ...
#define LLMAAS_KNN_MAX_BEST ...
#define LLMAAS_KNN_ALIGN ...

typedef struct llmaas_knn_codes {
    uint64_t n_rows;
    uint32_t n_dims;
    uint32_t n_front;
    const float * center;
    const float * steps;
    uint8_t * front;
    uint8_t * rest;
    float * scales;
    float * norms;
    float * front_norms;
} llmaas_knn_codes;

typedef struct llmaas_knn_rows {
    int fd;
    uint32_t n_dims;
    uint64_t n_rows;
    uint64_t offset;
    const uint32_t * sums;
} llmaas_knn_rows;

typedef struct llmaas_logits_info {
    float log_sum_exp;
    float max_prob;
} llmaas_logits_info;

llmaas_status llmaas_knn_quantize(
    const llmaas_knn_codes * codes, uint64_t first, uint64_t n, const float * keys);
llmaas_status llmaas_knn_scan(
    const llmaas_knn_codes * codes, uint64_t first, uint64_t n, const float * query, uint32_t n_best, uint32_t * scratch,
    int32_t * rows, float * distances, uint32_t * n_found);
llmaas_status llmaas_knn_sum(const uint8_t * keys, uint64_t n, uint32_t n_dims, uint32_t * sums);
llmaas_status llmaas_knn_rescore(
    const llmaas_knn_rows * file, const int32_t * rows, uint32_t n, const float * query, float * distances);
llmaas_status llmaas_logits_peek(const float * logits, uint32_t n_vocab, llmaas_logits_info * info);
llmaas_status llmaas_logits_mix(
    float * logits, uint32_t n_vocab, const int32_t * values, const float * distances, uint32_t k, float alpha, float beta,
    float theta, float far, llmaas_logits_info * info);
