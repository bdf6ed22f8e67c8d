/* Nearest neighbors among stored hidden states (keys), and their share in the next token's distribution.
 *
 * A key is stored as one byte per dimension: key[d] is about center[d] + steps[d] × scale × (code[d] - 128). Each
 * dimension has a step and each row a scale, so an unusually large dimension or row does not cost the others precision.
 * A scan ranks rows by these codes. The best rows are ranked again by their float16 values, which are read from a file.
 * All results are the same on every instruction set, however a scan is divided into ranges of rows. */
#ifndef LLMAAS_KNN_H
#define LLMAAS_KNN_H

#include "llmaas/base.h"

#define LLMAAS_KNN_MAX_DIMS 16384u
#define LLMAAS_KNN_MAX_BEST 4096u /* most rows that a scan returns, or that one call rescores or mixes */
#define LLMAAS_KNN_ALIGN    64u   /* alignment in bytes of the codes and of their stride */
#define LLMAAS_KNN_MIN_STEP 0x1p-50f
#define LLMAAS_KNN_MAX_STEP 0x1p50f

/* Codes of n_rows keys. A row takes one byte per dimension, rounded up to a multiple of LLMAAS_KNN_ALIGN. One matrix
 * holds the first n_front bytes of each row, another the rest, if any. Put the dimensions in which keys differ most
 * first: these alone then rule out nearly all rows, and the rest of such rows is not read. */
typedef struct llmaas_knn_codes {
    uint64_t n_rows;      /* fits int32_t */
    uint32_t n_dims;      /* 1 to LLMAAS_KNN_MAX_DIMS */
    uint32_t n_front;     /* a multiple of LLMAAS_KNN_ALIGN */
    const float * center; /* [n_dims] */
    const float * steps;  /* [n_dims], each LLMAAS_KNN_MIN_STEP to LLMAAS_KNN_MAX_STEP, or 0 where all keys are equal */
    uint8_t * front;      /* [n_rows × n_front], aligned to LLMAAS_KNN_ALIGN */
    uint8_t * rest;       /* the other bytes, also aligned; ignored if n_front covers the whole row */
    float * scales;       /* [n_rows] */
    float * norms;        /* [n_rows]: the part of a row's squared distances that does not depend on the query */
    float * front_norms;  /* [n_rows]: norms less what the other dimensions contribute to them at most, for lower bounds
                           * of distances from the front dimensions alone; ignored if n_front covers the whole row */
} llmaas_knn_codes;

/* Fill rows [first, first + n) from n × n_dims keys. EUNSUPPORTED: a key is not finite, too large to be squared, or
 * more than LLMAAS_KNN_MAX_STEP steps from the center. */
LLMAAS_API llmaas_status llmaas_knn_quantize(
    const llmaas_knn_codes * codes, uint64_t first, uint64_t n, const float * keys);

/* Find the n_best rows of [first, first + n) that are nearest to the query, nearest first (at equal distance the lower
 * row first), and their approximate squared distances. The result does not depend on n_front. *n_found: min(n, n_best).
 * scratch: n numbers; ignored if n_front covers the whole row. EUNSUPPORTED: the query is not finite or too large. */
LLMAAS_API llmaas_status llmaas_knn_scan(
    const llmaas_knn_codes * codes, uint64_t first, uint64_t n, const float * query, uint32_t n_best, uint32_t * scratch,
    int32_t * rows, float * distances, uint32_t * n_found);

/* Original keys in a file: n_rows of n_dims float16 values, one after another from `offset` on. */
typedef struct llmaas_knn_rows {
    int fd;
    uint32_t n_dims;
    uint64_t n_rows; /* fits int32_t */
    uint64_t offset;
    const uint32_t * sums; /* CRC-32C of each row */
} llmaas_knn_rows;

/* Compute the sums (CRC-32C) of n rows of n_dims float16 values. */
LLMAAS_API llmaas_status llmaas_knn_sum(const uint8_t * keys, uint64_t n, uint32_t n_dims, uint32_t * sums);

/* Compute squared distances between the query and rows of a file. All rows missing from the page cache are requested
 * before the first is awaited. EIO: see errno; ENODATA if the file ends early. ECORRUPT: a row has another sum. */
LLMAAS_API llmaas_status llmaas_knn_rescore(
    const llmaas_knn_rows * file, const int32_t * rows, uint32_t n, const float * query, float * distances);

typedef struct llmaas_logits_info {
    float log_sum_exp;
    float max_prob; /* probability of the model's most probable token */
} llmaas_logits_info;

/* Compute info for the logits. EUNSUPPORTED: a logit is NaN or +infinity, or all are -infinity. */
LLMAAS_API llmaas_status llmaas_logits_peek(const float * logits, uint32_t n_vocab, llmaas_logits_info * info);

/* Change the logits so that softmax gives (1 - w) p_LM + w p_kNN. p_kNN of a token is its neighbors' share of S, the
 * sum of exp(-distance / theta) over all neighbors. w = alpha (1 - beta max_prob) S / (S + exp(-far / theta)): this
 * counts the model as one more neighbor, at distance `far`. Only logits of the neighbors' tokens change, and none that
 * is -infinity, because somebody banned that token. info: of the logits before the change. 0 <= alpha, beta <= 1, theta
 * > 0; far may be +infinity. w is at most 1 - 2^-20, so the model always keeps a share. */
LLMAAS_API llmaas_status llmaas_logits_mix(
    float * logits, uint32_t n_vocab, const int32_t * values, const float * distances, uint32_t k, float alpha, float beta,
    float theta, float far, llmaas_logits_info * info);

#endif
