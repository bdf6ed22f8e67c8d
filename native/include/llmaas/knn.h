/* Nearest neighbours among stored hidden states (keys), and their share in the next token's distribution.
 *
 * A key is a byte a dimension: key[d] is about centre[d] + steps[d] × scale × (code[d] - 128). There is a step for each
 * dimension and a scale for each row, so that neither a dimension nor a row much larger than the rest costs these their
 * precision. A scan ranks rows by these codes; the best of them are ranked again by their float16 values, which are read
 * from a file. All results are the same on every instruction set, and for every division of a scan into ranges of rows. */
#ifndef LLMAAS_KNN_H
#define LLMAAS_KNN_H

#include "llmaas/base.h"

#define LLMAAS_KNN_MAX_DIMS 16384u
#define LLMAAS_KNN_MAX_BEST 4096u /* rows that a scan returns, or that one call rescores or mixes */
#define LLMAAS_KNN_ALIGN    64u   /* of codes, and of their stride */
#define LLMAAS_KNN_MIN_STEP 0x1p-50f
#define LLMAAS_KNN_MAX_STEP 0x1p50f

/* A row has as many bytes as it has dimensions, rounded up to a multiple of LLMAAS_KNN_ALIGN. The first n_front of them are
 * in one matrix, the rest, if any, in another: where the first dimensions are those in which keys differ most, they say of
 * nearly all rows that these are too far away, and the rest of such rows is not read. */
typedef struct llmaas_knn_codes {
    uint64_t n_rows;      /* fits int32_t */
    uint32_t n_dims;      /* 1 to LLMAAS_KNN_MAX_DIMS */
    uint32_t n_front;     /* a multiple of LLMAAS_KNN_ALIGN */
    const float * centre; /* n_dims */
    const float * steps;  /* n_dims, each LLMAAS_KNN_MIN_STEP to LLMAAS_KNN_MAX_STEP, or 0 where all keys are alike */
    uint8_t * front;      /* n_rows × n_front, at a multiple of LLMAAS_KNN_ALIGN */
    uint8_t * rest;       /* likewise; anything where n_front is all */
    float * scales;       /* n_rows */
    float * norms;        /* n_rows: a row's part of its squared distances that no query changes */
    float * front_norms;  /* n_rows: the least that is of its dimensions in front; anything where n_front is all */
} llmaas_knn_codes;

/* Fill rows [first, first + n) from n × n_dims keys. EUNSUPPORTED: one is not finite, or too large to be squared, or
 * more than LLMAAS_KNN_MAX_STEP steps from the centre. */
LLMAAS_API llmaas_status llmaas_knn_quantise(
    const llmaas_knn_codes * codes, uint64_t first, uint64_t n, const float * keys);

/* The n_best rows of [first, first + n) that are nearest to the query, nearest first (of two alike the lower row), and
 * their approximate squared distances. They do not depend on n_front. *n_found: min(n, n_best). EUNSUPPORTED: the query is
 * not finite or too large. scratch: n numbers; anything where n_front is all. */
LLMAAS_API llmaas_status llmaas_knn_scan(
    const llmaas_knn_codes * codes, uint64_t first, uint64_t n, const float * query, uint32_t n_best, uint32_t * scratch,
    int32_t * rows, float * distances, uint32_t * n_found);

/* Keys as they were, in a file: n_rows of n_dims float16 values, one after another from offset on. */
typedef struct llmaas_knn_rows {
    int fd;
    uint32_t n_dims;
    uint64_t n_rows; /* fits int32_t */
    uint64_t offset;
    const uint32_t * sums; /* CRC-32C of each row */
} llmaas_knn_rows;

/* The sums of n rows of n_dims float16 values. */
LLMAAS_API llmaas_status llmaas_knn_sum(const uint8_t * keys, uint64_t n, uint32_t n_dims, uint32_t * sums);

/* Squared distances between the query and rows of a file. Those that are not in the page cache are asked for together before
 * the first is waited for. EIO: errno tells; ENODATA when the file ends early. ECORRUPT: a row has another sum. */
LLMAAS_API llmaas_status llmaas_knn_rescore(
    const llmaas_knn_rows * file, const int32_t * rows, uint32_t n, const float * query, float * distances);

typedef struct llmaas_logits_info {
    float log_sum_exp;
    float max_prob; /* of the model's most probable token */
} llmaas_logits_info;

/* EUNSUPPORTED: a logit is NaN or +infinity, or all are -infinity. */
LLMAAS_API llmaas_status llmaas_logits_peek(const float * logits, uint32_t n_vocab, llmaas_logits_info * info);

/* Change the logits so that softmax gives (1 - w) p_LM + w p_kNN, where p_kNN of a token is the share of its neighbours in
 * S, the sum of exp(-distance / theta), and w = alpha (1 - beta max_prob) S / (S + exp(-far / theta)): one more neighbour,
 * at the distance `far`, says what the model says. Only neighbours' logits change, and none that is -infinity: somebody
 * banned that token. info: of the logits as they were. 0 <= alpha, beta <= 1, theta > 0, far may be +infinity, but w is at
 * most 1 - 2^-20: the model keeps a say. */
LLMAAS_API llmaas_status llmaas_logits_mix(
    float * logits, uint32_t n_vocab, const int32_t * values, const float * distances, uint32_t k, float alpha, float beta,
    float theta, float far, llmaas_logits_info * info);

#endif
