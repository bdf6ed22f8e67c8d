/* Nearest neighbors. Every instruction set gives the same bits as the generic kernels; scans find what a plain search
 * finds; mixing gives the requested probabilities; bad arguments are refused. */
#include "check.h"
#include "kernels.h"

#include "../kernels/f16.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <unistd.h>

enum { N_ROWS = 700, N_BEST = 20 };

static float uniform(void) { return (float) (rnd() >> 40) * 0x1p-23f - 1; }

static uint8_t * aligned(size_t n) { /* exactly n bytes at the end of the allocation, for ASan */
    uint8_t * p = aligned_alloc(LLMAAS_KNN_ALIGN, n);
    CHECK(p);
    return p;
}

static float * floats(size_t n) {
    float * p = (float *) (void *) exact(n * sizeof *p);
    for (size_t i = 0; i < n; ++i) {
        p[i] = uniform();
    }
    return p;
}

/* -- kernels -- */

static void check_dots(const llmaas_kernels * k, const llmaas_kernels * oracle, size_t stride, int extreme) {
    static llmaas_knn_query query;
    uint8_t * codes = aligned(3 * stride);
    uint32_t a[3], b[3];
    fill_random(codes, 3 * stride);
    memset(codes, extreme ? 255 : 7, stride);
    for (size_t i = 0; i < stride; ++i) {
        const int wide = extreme ? (i % 2 ? LLMAAS_KNN_WIDEST : -LLMAAS_KNN_WIDEST + (int) (i % 300))
                                 : (int) rnd_below(2 * LLMAAS_KNN_WIDEST + 1) - LLMAAS_KNN_WIDEST;
        const int high = (wide + 0x8080) / 256 - 128;
        query.wide[i] = (int16_t) wide;
        query.high[i] = (int8_t) high;
        query.low[i]  = (int8_t) (wide - 256 * high);
    }
    oracle->knn_dots(codes, stride, 3, &query, a);
    k->knn_dots(codes, stride, 3, &query, b);
    CHECK(memcmp(a, b, sizeof a) == 0);
    free(codes);
}

static void check_distance(const llmaas_kernels * k, const llmaas_kernels * oracle, size_t n_dims) {
    uint8_t * row = exact(2 * n_dims);
    float *   query = floats(n_dims);
    double    sum = 0;
    for (size_t i = 0; i < n_dims; ++i) {
        const uint16_t value = (uint16_t) (rnd() & 0xbfff); /* includes subnormal values */
        const double difference = (double) f16_to_f32(value) - (double) query[i];
        memcpy(row + 2 * i, &value, 2);
        sum += difference * difference;
    }
    const float a = oracle->knn_distance(row, query, n_dims), b = k->knn_distance(row, query, n_dims);
    CHECK(memcmp(&a, &b, sizeof a) == 0 && fabs((double) a - sum) <= 1e-5 * sum);
    free(row), free(query);
}

static void check_softmax(const llmaas_kernels * k, const llmaas_kernels * oracle, size_t n) {
    float * logits = floats(n);
    int     is_nan = 1;
    double  sum = 0;
    for (size_t i = 0; i < n; ++i) {
        logits[i] = i % 7 == 3 ? -INFINITY : logits[i] * (i % 2 ? 200 : 5);
    }
    const float max = oracle->logits_max(logits, n, &is_nan);
    CHECK(!is_nan && k->logits_max(logits, n, &is_nan) == max && !is_nan);
    for (size_t i = 0; i < n; ++i) {
        CHECK(logits[i] <= max);
        sum += exp((double) logits[i] - (double) max);
    }
    const double a = oracle->logits_sum(logits, n, max), b = k->logits_sum(logits, n, max);
    CHECK(a == b && fabs(a - sum) <= 1e-5 * sum);
    for (size_t i = 0; i < n; i += 1 + n / 50) {
        const float kept = logits[i];
        logits[i] = NAN;
        k->logits_max(logits, n, &is_nan);
        CHECK(is_nan);
        logits[i] = kept;
    }
    free(logits);
}

static void check_kernels(void) {
    CHECK(llmaas_kernels_select("generic") == LLMAAS_OK);
    const llmaas_kernels * oracle = llmaas_k();
    for (size_t i = 0; i < sizeof check_isas / sizeof *check_isas; ++i) {
        if (llmaas_kernels_select(check_isas[i]) != LLMAAS_OK) {
            continue; /* this CPU lacks it */
        }
        const llmaas_kernels * k = llmaas_k();
        for (size_t stride = 64; stride <= LLMAAS_KNN_MAX_DIMS; stride += stride < 640 ? 64 : 5248) {
            check_dots(k, oracle, stride, 0);
            check_dots(k, oracle, stride, 1);
        }
        for (size_t n = 1; n < 70; ++n) {
            check_distance(k, oracle, n);
        }
        check_distance(k, oracle, LLMAAS_KNN_MAX_DIMS);
        for (size_t n = 16; n < 10000; n = n < 40 ? n + 1 : n * 2 + 5) {
            check_softmax(k, oracle, n);
        }
    }
}

/* Make keys. n_front 0: all dimensions. slope: how fast dimensions shrink. */

typedef struct keys {
    llmaas_knn_codes codes;
    float * values, * center, * steps;
} keys;

/* without a rest, nobody reads one */
static keys make_split_keys(uint32_t n_dims, uint64_t n_rows, uint32_t n_front, float slope) {
    keys k = {.values = floats(n_rows * n_dims), .center = floats(n_dims), .steps = floats(n_dims)};
    const uint32_t stride = (n_dims + 63) / 64 * 64;
    for (uint32_t d = 0; d < n_dims; ++d) {
        k.steps[d] = d % 5 == 4 ? 0 : (fabsf(k.steps[d]) + 0.01f) * powf(1 + (float) d, -slope);
        for (uint64_t r = 0; r < n_rows; ++r) {
            float * value = &k.values[r * n_dims + d];
            *value = k.center[d] + *value * k.steps[d] * (r % 9 ? 1 : 30);
        }
    }
    k.codes = (llmaas_knn_codes) {
        .n_rows = n_rows, .n_dims = n_dims, .n_front = n_front ? n_front : stride, .center = k.center, .steps = k.steps,
        .scales = floats(n_rows), .norms = floats(n_rows)};
    k.codes.front = aligned(n_rows * k.codes.n_front);
    if (n_front) { /* Return the largest coding error of a key: half a scale in each dimension's steps. */
        k.codes.rest = aligned(n_rows * (stride - n_front));
        k.codes.front_norms = floats(n_rows);
    }
    CHECK(llmaas_knn_quantize(&k.codes, 0, n_rows, k.values) == LLMAAS_OK);
    return k;
}

static keys make_keys(uint32_t n_dims, uint64_t n_rows) { return make_split_keys(n_dims, n_rows, 0, 0); }

static void free_keys(keys * k) {
    free(k->values), free(k->center), free(k->steps), free(k->codes.front), free(k->codes.rest), free(k->codes.scales);
    free(k->codes.norms), free(k->codes.front_norms);
}

static double exact_distance(const keys * k, uint64_t row, const float * query) {
    double sum = 0;
    for (uint32_t d = 0; d < k->codes.n_dims; ++d) {
        const double difference = (double) k->values[row * k->codes.n_dims + d] - (double) query[d];
        sum += difference * difference;
    }
    return sum;
}

static double from_center(const keys * k, const float * key) {
    double sum = 0;
    for (uint32_t d = 0; d < k->codes.n_dims; ++d) {
        const double difference = (double) key[d] - (double) k->center[d];
        sum += difference * difference;
    }
    return sqrt(sum);
}

/* Check that every row is returned once, in order, at a distance that its coding and the query's explain. */
static double loss_bound(const keys * k, uint64_t row) {
    double sum = 0;
    for (uint32_t d = 0; d < k->codes.n_dims; ++d) {
        const double most = 0.51 * (double) k->steps[d] * (double) k->codes.scales[row];
        sum += most * most;
    }
    return sqrt(sum);
}

/* Every row is returned once, in order, at a distance that its coding and the query's explain. */
static void check_distances(const keys * k, const float * query) {
    const double size = from_center(k, query);
    const uint32_t n = (uint32_t) k->codes.n_rows;
    int32_t * rows = (int32_t *) (void *) exact(n * sizeof *rows);
    uint8_t * seen = exact(n);
    float *   found = floats(n);
    uint32_t  n_found;
    memset(seen, 0, n);
    CHECK(llmaas_knn_scan(&k->codes, 0, n, query, n + 5, NULL, rows, found, &n_found) == LLMAAS_OK && n_found == n);
    for (uint32_t i = 0; i < n; ++i) {
        const double distance = exact_distance(k, (uint64_t) rows[i], query);
        const double sizes = size * from_center(k, k->values + (size_t) rows[i] * k->codes.n_dims);
        const double slack = 2 * sqrt(distance) * loss_bound(k, (uint64_t) rows[i]) + 2e-4 * sizes + 1e-5 * (distance + 1);
        CHECK(fabs((double) found[i] - distance) <= slack && !seen[rows[i]]);
        CHECK(i == 0 || found[i] > found[i - 1] || (found[i] == found[i - 1] && rows[i] > rows[i - 1]));
        seen[rows[i]] = 1;
    }
    for (uint32_t n_best = 1; n_best < n; n_best = n_best * 3 + 1) { /* a smaller n_best returns the first of these
                                                                      * rows */
        int32_t * few = (int32_t *) (void *) exact(n_best * sizeof *few);
        float *   at = floats(n_best);
        CHECK(llmaas_knn_scan(&k->codes, 0, n, query, n_best, NULL, few, at, &n_found) == LLMAAS_OK && n_found == n_best);
        CHECK(memcmp(few, rows, n_best * sizeof *few) == 0 && memcmp(at, found, n_best * sizeof *at) == 0);
        free(few), free(at);
    }
    free(rows), free(seen), free(found);
}

static void check_ranges(const keys * k, const float * query) {
    int32_t rows[N_BEST];
    float   distances[N_BEST];
    uint32_t n_found;
    for (int i = 0; i < 30; ++i) {
        const uint64_t first = rnd_below((uint32_t) k->codes.n_rows + 1), n = rnd_below((uint32_t) (k->codes.n_rows - first) + 1);
        CHECK(llmaas_knn_scan(&k->codes, first, n, query, N_BEST, NULL, rows, distances, &n_found) == LLMAAS_OK);
        CHECK(n_found == (n < N_BEST ? n : N_BEST));
        for (uint32_t r = 0; r < n_found; ++r) {
            CHECK((uint64_t) rows[r] >= first && (uint64_t) rows[r] < first + n);
        }
    }
}

static void check_scans(void) {
    static const uint32_t sizes[] = {1, 3, 63, 64, 65, 256, 700};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; ++s) {
        keys k = make_keys(sizes[s], N_ROWS);
        float * query = floats(sizes[s]);
        for (size_t i = 0; i < sizeof check_isas / sizeof *check_isas; ++i) {
            if (llmaas_kernels_select(check_isas[i]) == LLMAAS_OK) {
                check_distances(&k, query);
                check_distances(&k, k.center);
                check_distances(&k, k.values);
                check_ranges(&k, query);
            }
        }
        free(query);
        free_keys(&k);
    }
}

/* Check that codes in two parts give bit-identical results to codes in one, whatever can be ruled out. */
static void check_split(uint32_t n_dims, uint32_t n_front, float slope, uint64_t seed) {
    enum { ROWS = 3000 };
    check_seed = seed;
    keys whole = make_split_keys(n_dims, ROWS, 0, slope);
    check_seed = seed;
    keys split = make_split_keys(n_dims, ROWS, n_front, slope);
    int32_t  rows[2][300];
    float    distances[2][300];
    uint32_t n_found[2];
    for (uint32_t i = 0; i < 12; ++i) {
        const float *  query = i % 4 ? split.values + (size_t) rnd_below(ROWS) * n_dims : split.steps;
        const uint64_t first = i % 3 ? 0 : rnd_below(ROWS), n = rnd_below((uint32_t) (ROWS - first) + 1);
        const uint32_t n_best = 1 + rnd_below(300);
        uint32_t * scratch = malloc((n + 1) * sizeof *scratch);
        CHECK(scratch);
        for (int j = 0; j < 2; ++j) {
            const llmaas_knn_codes * codes = j ? &split.codes : &whole.codes;
            CHECK(llmaas_knn_scan(codes, first, n, query, n_best, scratch, rows[j], distances[j], &n_found[j]) == LLMAAS_OK);
        }
        CHECK(n_found[0] == n_found[1] && memcmp(rows[0], rows[1], n_found[0] * sizeof rows[0][0]) == 0);
        CHECK(memcmp(distances[0], distances[1], n_found[0] * sizeof distances[0][0]) == 0);
        free(scratch);
    }
    CHECK(llmaas_knn_scan(&split.codes, 0, 9, split.steps, 3, NULL, rows[1], distances[1], &n_found[1]) == LLMAAS_EINVAL);
    free_keys(&whole);
    free_keys(&split);
}

static void check_splits(void) {
    for (size_t i = 0; i < sizeof check_isas / sizeof *check_isas; ++i) {
        if (llmaas_kernels_select(check_isas[i]) == LLMAAS_OK) {
            for (uint32_t slope = 0; slope < 4; ++slope) {
                check_split(65, 64, 0.5f * (float) slope, i + slope);
                check_split(256, 128, 0.5f * (float) slope, i + slope);
                check_split(300, 64, 0.5f * (float) slope, i + slope);
            }
        }
    }
}

static void check_alike(void) {
    keys k = make_keys(40, N_ROWS);
    int32_t rows[N_BEST];
    float   distances[N_BEST];
    uint32_t n_found;
    for (uint64_t r = 0; r < N_ROWS; ++r) {
        CHECK(llmaas_knn_quantize(&k.codes, r, 1, k.values) == LLMAAS_OK);
    }
    CHECK(llmaas_knn_scan(&k.codes, 0, N_ROWS, k.values, N_BEST, NULL, rows, distances, &n_found) == LLMAAS_OK);
    for (int32_t i = 0; i < N_BEST; ++i) {
        CHECK(rows[i] == i && distances[i] == distances[0]);
    }
    free_keys(&k);
}

/* Check few equal rows, then many: the first ones have the lower numbers, though the many fill the buffer. */
static void check_alike_split(void) {
    keys k = make_split_keys(128, 600, 64, 0);
    uint32_t scratch[600], n_found;
    int32_t  rows[20];
    float    distances[20];
    for (uint64_t r = 0; r < 600; r += r < 250 ? 25 : 1) {
        CHECK(llmaas_knn_quantize(&k.codes, r, 1, k.values) == LLMAAS_OK);
    }
    CHECK(llmaas_knn_scan(&k.codes, 0, 600, k.values, 20, scratch, rows, distances, &n_found) == LLMAAS_OK);
    for (int32_t i = 0; i < 20; ++i) {
        CHECK(rows[i] == (i < 10 ? 25 * i : 240 + i));
    }
    free_keys(&k);
}

static void check_refusals(void) {
    static const float bad[] = {NAN, INFINITY, -INFINITY, 3e38f, -1e30f};
    keys k = make_keys(70, 10);
    float * query = floats(70);
    int32_t rows[N_BEST];
    float   distances[N_BEST];
    uint32_t n_found;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
        for (size_t d = 0; d < 70; d += 3) {
            const float kept = query[d];
            query[d] = bad[i];
            CHECK(llmaas_knn_quantize(&k.codes, 3, 1, query) == LLMAAS_EUNSUPPORTED);
            CHECK(llmaas_knn_scan(&k.codes, 0, 10, query, 5, NULL, rows, distances, &n_found) == LLMAAS_EUNSUPPORTED);
            query[d] = kept;
        }
    }
    CHECK(llmaas_knn_scan(&k.codes, 0, 11, query, 5, NULL, rows, distances, &n_found) == LLMAAS_EINVAL);
    CHECK(llmaas_knn_scan(&k.codes, 11, 0, query, 5, NULL, rows, distances, &n_found) == LLMAAS_EINVAL);
    CHECK(llmaas_knn_scan(&k.codes, 2, UINT64_MAX, query, 5, NULL, rows, distances, &n_found) == LLMAAS_EINVAL);
    CHECK(llmaas_knn_scan(&k.codes, 0, 10, query, 0, NULL, rows, distances, &n_found) == LLMAAS_EINVAL);
    const uint32_t too_many = LLMAAS_KNN_MAX_BEST + 1;
    CHECK(llmaas_knn_scan(&k.codes, 0, 10, query, too_many, NULL, rows, distances, &n_found) == LLMAAS_EINVAL);
    CHECK(llmaas_knn_scan(&k.codes, 10, 0, query, 5, NULL, rows, distances, &n_found) == LLMAAS_OK && n_found == 0);
    CHECK(llmaas_knn_quantize(&k.codes, 9, 2, k.values) == LLMAAS_EINVAL);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
        k.steps[7] = bad[i];
        CHECK(llmaas_knn_quantize(&k.codes, 0, 1, k.values) == LLMAAS_EINVAL);
    }
    const llmaas_knn_codes none = {.n_dims = 70, .n_front = 128, .center = k.center, .steps = k.steps};
    CHECK(llmaas_knn_scan(&none, 0, 0, query, 5, NULL, rows, distances, &n_found) == LLMAAS_OK && n_found == 0);
    uint32_t scratch[10];
    static const uint32_t fronts[] = {0, 1, 63, 65, 192, UINT32_MAX, 64}; /* the last one without a rest to read */
    for (size_t i = 0; i < sizeof fronts / sizeof *fronts; ++i) {
        k.codes.n_front = fronts[i];
        CHECK(llmaas_knn_scan(&k.codes, 0, 10, query, 5, scratch, rows, distances, &n_found) == LLMAAS_EINVAL);
    }
    k.codes.n_front = 128;
    for (int i = 0; i < 10; ++i) { /* whatever a damaged file might hold is not a valid distance */
        k.codes.scales[i] = k.codes.norms[i] = NAN;
    }
    CHECK(llmaas_knn_scan(&k.codes, 0, 10, query, 5, NULL, rows, distances, &n_found) == LLMAAS_OK && n_found == 0);
    free(query);
    free_keys(&k);
}

/* -- rescoring -- */

static void check_rescore(uint32_t n_dims) {
    enum { OFFSET = 131, N = 40 };
    char path[] = "/tmp/llmaas-knn-XXXXXX";
    const int fd = mkstemp(path);
    CHECK(fd >= 0 && unlink(path) == 0);
    const size_t row_bytes = 2 * (size_t) n_dims;
    uint8_t * file = exact(N * row_bytes);
    float *   query = floats(n_dims);
    int32_t   rows[2 * N];
    float     distances[2 * N];
    fill_like_kv(file, N * (size_t) n_dims);
    CHECK(pwrite(fd, file, N * row_bytes, OFFSET) == (ssize_t) (N * row_bytes));
    for (uint32_t i = 0; i < 2 * N; ++i) { /* single, adjacent and duplicate rows */
        rows[i] = (int32_t) (i < N ? i / 3 * 2 : rnd_below(N));
    }
    uint32_t sums[N + 1] = {0};
    llmaas_knn_rows in = {.fd = fd, .n_dims = n_dims, .n_rows = N + 1, .offset = OFFSET, .sums = sums};
    CHECK(llmaas_knn_sum(file, N, n_dims, sums) == LLMAAS_OK);
    CHECK(llmaas_knn_rescore(&in, rows, 2 * N, query, distances) == LLMAAS_OK);
    for (uint32_t i = 0; i < 2 * N; ++i) {
        const float expected = llmaas_k()->knn_distance(file + (size_t) rows[i] * row_bytes, query, n_dims);
        CHECK(memcmp(&distances[i], &expected, sizeof expected) == 0);
    }
    ++sums[rows[7]];
    CHECK(llmaas_knn_rescore(&in, rows, 2 * N, query, distances) == LLMAAS_ECORRUPT);
    --sums[rows[7]];
    rows[5] = N; /* the file has one row fewer than it should */
    CHECK(llmaas_knn_rescore(&in, rows, 2 * N, query, distances) == LLMAAS_EIO && errno == ENODATA);
    rows[5] = N + 1;
    CHECK(llmaas_knn_rescore(&in, rows, 2 * N, query, distances) == LLMAAS_EINVAL);
    rows[5] = -1;
    CHECK(llmaas_knn_rescore(&in, rows, 2 * N, query, distances) == LLMAAS_EINVAL);
    in.offset = UINT64_MAX;
    CHECK(llmaas_knn_rescore(&in, rows, 1, query, distances) == LLMAAS_EINVAL);
    in.offset = INT64_MAX / 2;
    CHECK(llmaas_knn_rescore(&in, rows, 1, query, distances) == LLMAAS_EIO);
    in.fd = -1;
    CHECK(llmaas_knn_rescore(&in, rows, 1, query, distances) == LLMAAS_EIO && errno == EBADF);
    CHECK(close(fd) == 0);
    free(file), free(query);
}

/* -- mixing -- */

static void softmax(const float * logits, uint32_t n, double * p) {
    double max = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < n; ++i) {
        max = (double) logits[i] > max ? (double) logits[i] : max;
    }
    for (uint32_t i = 0; i < n; ++i) {
        sum += p[i] = exp((double) logits[i] - max);
    }
    for (uint32_t i = 0; i < n; ++i) {
        p[i] /= sum;
    }
}

/* Check mixing. shift: added to all distances. far: distance at which the model counts as a neighbor. */
static void check_mix(uint32_t n_vocab, uint32_t k, float alpha, float beta, float theta, float shift, float far) {
    float *   logits = floats(n_vocab), * before = floats(n_vocab), * distances = floats(k);
    int32_t * values = (int32_t *) (void *) exact(k * sizeof *values);
    double *  p = (double *) (void *) exact(n_vocab * sizeof *p), * q = (double *) (void *) exact(n_vocab * sizeof *q);
    double    nearest = INFINITY, sum = 0, banned = 0, most = 0;
    for (uint32_t i = 0; i < n_vocab; ++i) {
        before[i] = logits[i] = i % 11 == 2 ? -INFINITY : 8 * logits[i];
        q[i] = 0;
    }
    for (uint32_t i = 0; i < k; ++i) {
        values[i] = (int32_t) rnd_below(n_vocab);
        distances[i] = shift + 20 * fabsf(distances[i]);
        nearest = (double) distances[i] < nearest ? (double) distances[i] : nearest;
    }
    for (uint32_t i = 0; i < k; ++i) {
        const double weight = exp((nearest - (double) distances[i]) / (double) theta);
        q[values[i]] += weight;
        sum += weight;
    }
    softmax(before, n_vocab, p);
    for (uint32_t i = 0; i < n_vocab; ++i) {
        most = p[i] > most ? p[i] : most;
    }
    llmaas_logits_info info, again;
    CHECK(llmaas_logits_peek(logits, n_vocab, &info) == LLMAAS_OK && fabs((double) info.max_prob - most) < 1e-5);
    CHECK(llmaas_logits_mix(logits, n_vocab, values, distances, k, alpha, beta, theta, far, &again) == LLMAAS_OK);
    CHECK(memcmp(&info, &again, sizeof info) == 0);
    const double others = exp((nearest - (double) far) / (double) theta);
    const double w = (double) alpha * (1 - (double) beta * most) * sum / (sum + others);
    for (uint32_t i = 0; i < n_vocab; ++i) {
        CHECK(q[i] > 0 || memcmp(&logits[i], &before[i], sizeof *logits) == 0);
        p[i] = isinf(before[i]) ? 0 : (1 - w) * p[i] + w * q[i] / sum;
        banned += isinf(before[i]) ? w * q[i] / sum : 0;
    }
    softmax(logits, n_vocab, q);
    for (uint32_t i = 0; i < n_vocab; ++i) { /* all tokens share what the banned ones would have got */
        CHECK(fabs(q[i] - p[i] / (1 - banned)) < 2e-5);
        CHECK(isinf(before[i]) == isinf(logits[i]));
    }
    free(logits), free(before), free(distances), free(values), free(p), free(q);
}

static void check_mixing(void) {
    static const uint32_t vocabularies[] = {3, 15, 16, 17, 500, 5000};
    for (size_t v = 0; v < sizeof vocabularies / sizeof *vocabularies; ++v) {
        for (uint32_t k = 1; k <= 300; k = k * 3 + 1) {
            check_mix(vocabularies[v], k, 0.3f, 0.0f, 10, 0, INFINITY);
            check_mix(vocabularies[v], k, 0.9f, 1.0f, 0.5f, 0, 3);
            check_mix(vocabularies[v], k, 0.25f, 0.5f, 0.01f, 1e5f, INFINITY); /* exp(-distance / theta) is 0 for all */
            check_mix(vocabularies[v], k, 0.25f, 0.5f, 0.01f, 1e5f, 0);
            check_mix(vocabularies[v], k, 0.0f, 0.5f, 1, 0, 5);
            check_mix(vocabularies[v], k, 0.999f, 0.0f, 1e9f, 0, INFINITY);
        }
    }
}

static void check_mix_refusals(void) {
    float logits[20], same[20], distances[2] = {1, 2};
    int32_t values[2] = {3, 4};
    llmaas_logits_info info;
    for (int i = 0; i < 20; ++i) {
        same[i] = logits[i] = uniform();
    }
    static const float bad[][3] = {{-0.1f, 0, 1}, {1.1f, 0, 1}, {0.5f, -1, 1}, {0.5f, 2, 1}, {0.5f, 0, 0},
                                   {0.5f, 0, -1}, {NAN, 0, 1}, {0.5f, NAN, 1}, {0.5f, 0, NAN}, {0.5f, 0, INFINITY}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
        const float alpha = bad[i][0], beta = bad[i][1], theta = bad[i][2];
        CHECK(llmaas_logits_mix(logits, 20, values, distances, 2, alpha, beta, theta, INFINITY, &info) == LLMAAS_EINVAL);
    }
    values[1] = 20;
    CHECK(llmaas_logits_mix(logits, 20, values, distances, 2, 0.5f, 0, 1, INFINITY, &info) == LLMAAS_EINVAL);
    values[1] = -1;
    CHECK(llmaas_logits_mix(logits, 20, values, distances, 2, 0.5f, 0, 1, INFINITY, &info) == LLMAAS_EINVAL);
    values[1] = 4;
    distances[1] = NAN;
    CHECK(llmaas_logits_mix(logits, 20, values, distances, 2, 0.5f, 0, 1, INFINITY, &info) == LLMAAS_EINVAL);
    distances[1] = 2;
    const uint32_t too_many = LLMAAS_KNN_MAX_BEST + 1;
    CHECK(llmaas_logits_mix(logits, 20, values, distances, too_many, 0.5f, 0, 1, INFINITY, &info) == LLMAAS_EINVAL);
    CHECK(llmaas_logits_mix(logits, 20, values, distances, 2, 0.5f, 0, 1, NAN, &info) == LLMAAS_EINVAL);
    CHECK(llmaas_logits_mix(logits, 20, values, distances, 2, 0.5f, 0, 1, -INFINITY, &info) == LLMAAS_EINVAL);
    CHECK(llmaas_logits_mix(logits, 20, NULL, NULL, 0, 0.5f, 0, 1, INFINITY, &info) == LLMAAS_OK);
    CHECK(memcmp(logits, same, sizeof same) == 0);
    CHECK(llmaas_logits_mix(logits, 20, values, distances, 2, 1, 0, 1, INFINITY, &info) == LLMAAS_OK); /* the model
                                                                                                        * keeps a
                                                                                                        * share */
    CHECK(isfinite(logits[3]) && logits[0] == same[0]);
    logits[7] = NAN;
    CHECK(llmaas_logits_peek(logits, 20, &info) == LLMAAS_EUNSUPPORTED);
    logits[7] = INFINITY;
    CHECK(llmaas_logits_peek(logits, 20, &info) == LLMAAS_EUNSUPPORTED);
    for (int i = 0; i < 20; ++i) {
        logits[i] = -INFINITY;
    }
    CHECK(llmaas_logits_mix(logits, 20, values, distances, 2, 0.5f, 0, 1, INFINITY, &info) == LLMAAS_EUNSUPPORTED);
    CHECK(llmaas_logits_peek(logits, 0, &info) == LLMAAS_EINVAL);
}

int main(void) {
    check_kernels();
    check_scans();
    check_splits();
    check_alike();
    check_alike_split();
    check_refusals();
    check_rescore(33);
    check_rescore(2048);
    check_rescore(LLMAAS_KNN_MAX_DIMS);
    check_mixing();
    check_mix_refusals();
    return 0;
}
