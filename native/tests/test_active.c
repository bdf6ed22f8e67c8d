/* Products with active channels: compared with plain sums in double; bit-identical on every instruction set and however
 * rows are divided. Also: which channels are active. */
#include "check.h"
#include "f16.h"
#include "kernels.h"

#include "llmaas/sparse.h"

#include <math.h>

enum { CHUNK = LLMAAS_CHUNK_ROWS, BLOCK = LLMAAS_BLOCK_COLUMNS };

typedef struct kind {
    uint32_t n_bits;
    bool     has_mins;
} kind;

static const kind kinds[] = {{4, false}, {4, true}, {8, false}};

/* A matrix as it lies in a file: one piece of memory per channel, of exactly its size, at an odd offset. */
typedef struct matrix {
    uint32_t    n_bits, n_rows, n_padded, n_channels;
    size_t      offset;
    uint8_t **  channels; /* [n_channels] */
    uint16_t *  scales;   /* [n_channels / 32][n_padded] */
    uint16_t *  mins;     /* same shape, or NULL */
} matrix;

static size_t channel_bytes(const matrix * m) { return (size_t) m->n_padded * m->n_bits / 8; }

static void set_number(const matrix * m, uint32_t channel, uint32_t row, uint32_t number) {
    uint8_t * chunk = m->channels[channel] + m->offset + (size_t) (row / CHUNK) * (CHUNK * m->n_bits / 8);
    const uint32_t r = row % CHUNK;
    if (m->n_bits == 8) {
        chunk[r] = (uint8_t) number;
    } else {
        chunk[r % 64] = (uint8_t) (r < 64 ? (chunk[r % 64] & 0xf0) | number : (chunk[r % 64] & 0x0f) | number << 4);
    }
}

static int32_t number_of(const matrix * m, uint32_t channel, uint32_t row) {
    const uint8_t * chunk = m->channels[channel] + m->offset + (size_t) (row / CHUNK) * (CHUNK * m->n_bits / 8);
    const uint32_t r = row % CHUNK;
    const int32_t zero = m->mins ? 0 : 1 << (m->n_bits - 1);
    return (m->n_bits == 8 ? chunk[r] : r < 64 ? chunk[r] & 15 : chunk[r - 64] >> 4) - zero;
}

/* Return a weight's scale or minimum. */
static double of_block(const matrix * m, const uint16_t * values, uint32_t channel, uint32_t row) {
    return values ? (double) f16_to_f32(values[(size_t) (channel / BLOCK) * m->n_padded + row]) : 0;
}

static uint16_t * random_f16(const matrix * m) {
    uint16_t * values = (void *) exact((size_t) m->n_channels / BLOCK * m->n_padded * sizeof *values);
    for (size_t i = 0; i < (size_t) m->n_channels / BLOCK * m->n_padded; ++i) {
        values[i] = i % m->n_padded < m->n_rows ? (uint16_t) ((rnd() & 0x83ff) | (8 + rnd_below(8)) << 10) : 0;
    }
    return values;
}

/* Make a matrix of random numbers, or of one and the same number. */
static matrix matrix_new(kind of, uint32_t n_rows, uint32_t n_channels, int number) {
    const uint32_t n_bits = of.n_bits;
    matrix m = {n_bits, n_rows, (n_rows + CHUNK - 1) / CHUNK * CHUNK, n_channels, rnd_below(3) * 21, NULL, NULL, NULL};
    m.channels = (void *) exact(n_channels * sizeof *m.channels);
    m.scales = random_f16(&m);
    m.mins = of.has_mins ? random_f16(&m) : NULL;
    for (uint32_t j = 0; j < n_channels; ++j) {
        m.channels[j] = exact(m.offset + channel_bytes(&m));
        for (uint32_t r = 0; r < m.n_padded; ++r) {
            set_number(&m, j, r, r >= n_rows ? 1u << (n_bits - 1) : number < 0 ? rnd_below(1u << n_bits) : (uint32_t) number);
        }
    }
    return m;
}

static void matrix_free(matrix * m) {
    for (uint32_t j = 0; j < m->n_channels; ++j) {
        free(m->channels[j]);
    }
    free(m->channels), free(m->scales), free(m->mins);
}

static llmaas_active * active_new(uint32_t n_channels) {
    llmaas_active * active;
    CHECK(llmaas_active_new(n_channels, &active) == LLMAAS_OK);
    CHECK(active->n_channels == n_channels && active->n == 0 && active->first[n_channels / BLOCK] == 0);
    return active;
}

static float * random_activation(uint32_t n) {
    float * x = (void *) exact(n * sizeof *x);
    for (uint32_t j = 0; j < n; ++j) {
        x[j] = ((float) rnd_below(2001) - 1000) / 300 * (rnd_below(20) ? 1 : 30);
    }
    return x;
}

/* Return the columns. Only the active channels' bytes are readable. */
static const uint8_t ** columns_of(const matrix * m, const llmaas_active * active) {
    const uint8_t ** columns = (void *) exact(active->n * sizeof *columns);
    for (uint32_t i = 0; i < active->n; ++i) {
        columns[i] = m->channels[active->channels[i]];
    }
    return columns;
}

/* Multiply rows in pieces of n_together chunks. */
static float * multiply(const matrix * m, const llmaas_active * active, uint32_t n_together) {
    float * y = (void *) exact(m->n_rows * sizeof *y);
    const uint8_t ** columns = columns_of(m, active);
    for (uint32_t row = 0; row < m->n_rows; row += n_together * CHUNK) {
        const uint32_t end = m->n_rows - row < n_together * CHUNK ? m->n_rows : row + n_together * CHUNK;
        llmaas_active_multiply(active, m->n_bits, columns, m->offset, m->scales, m->mins, m->n_padded, row, end, y);
    }
    free(columns);
    return y;
}

static void check_near(const matrix * m, const llmaas_active * active, const float * x, const float * y) {
    for (uint32_t r = 0; r < m->n_rows; ++r) {
        double coded = 0, exact_sum = 0, size = 0, error = 0;
        for (uint32_t i = 0; i < active->n; ++i) {
            const uint32_t j = active->channels[i];
            const double scaled = of_block(m, m->scales, j, r) * number_of(m, j, r), least = of_block(m, m->mins, j, r);
            const double w = scaled - least, d = (double) active->scales[j / BLOCK];
            coded     += w * d * active->values[i];
            exact_sum += w * (double) x[j];
            size      += (fabs(scaled) + fabs(least)) * d * 127;
            error     += fabs(w * d) * 0.5001;
        }
        CHECK(fabs((double) y[r] - coded) <= 1e-6 * size);
        CHECK(fabs((double) y[r] - exact_sum) <= error + 1e-6 * size);
    }
}

static void check_products(const matrix * m, const llmaas_active * active, const float * x) {
    CHECK(llmaas_kernels_select("generic") == LLMAAS_OK);
    const size_t n = m->n_rows * sizeof(float);
    float * want = multiply(m, active, UINT32_MAX / CHUNK);
    check_near(m, active, x, want);
    for (size_t i = 0; i < sizeof check_isas / sizeof *check_isas; ++i) {
        if (llmaas_kernels_select(check_isas[i]) != LLMAAS_OK) {
            continue; /* this CPU lacks it */
        }
        for (uint32_t n_together = 1; n_together < 200; n_together = 3 * n_together + 2) {
            float * y = multiply(m, active, n_together);
            CHECK(memcmp(y, want, n) == 0);
            free(y);
        }
    }
    free(want);
}

static const uint32_t rows_list[] = {1, 63, 64, 65, 127, 128, 129, 200, 1024, 1025, 2100, 8192, 8193, 17000};

static void check_sizes(kind of) {
    for (size_t i = 0; i < sizeof rows_list / sizeof *rows_list; ++i) {
        const uint32_t n_channels = BLOCK * (1 + rnd_below(6));
        matrix          m = matrix_new(of, rows_list[i], n_channels, -1);
        float *         x = random_activation(n_channels);
        llmaas_active * active = active_new(n_channels);
        static const float thresholds[] = {0, 0.5f, 2, 3, 1e9f}; /* from all channels to none */
        for (size_t t = 0; t < sizeof thresholds / sizeof *thresholds; ++t) {
            llmaas_active_above(active, x, thresholds[t]);
            check_products(&m, active, x);
        }
        for (uint32_t k = 0; k <= n_channels; k += 1 + rnd_below(2 * n_channels)) {
            llmaas_active_top(active, x, k);
            check_products(&m, active, x);
        }
        llmaas_active_free(active), free(x), matrix_free(&m);
    }
}

/* Check the largest sums that a block can have, of either sign. */
static void check_extremes(kind of) {
    static const int signs[][2] = {{1, 1}, {-1, -1}, {1, -1}};
    for (int last = 0; last < 2; ++last) {
        matrix          m = matrix_new(of, 300, 2 * BLOCK, last ? (1 << of.n_bits) - 1 : 0);
        llmaas_active * active = active_new(2 * BLOCK);
        for (size_t s = 0; s < sizeof signs / sizeof *signs; ++s) {
            float x[2 * BLOCK];
            for (uint32_t j = 0; j < 2 * BLOCK; ++j) {
                x[j] = (float) signs[s][j % 2];
            }
            llmaas_active_above(active, x, 0);
            CHECK(active->n == 2 * BLOCK && active->values[0] == 127 * signs[s][0]);
            check_products(&m, active, x);
        }
        llmaas_active_free(active), matrix_free(&m);
    }
}

/* Check that n channels are active, in ascending order, with the right values and block starts. */
static void check_active(const llmaas_active * active, const float * x, uint32_t n) {
    CHECK(active->n == n && active->first[0] == 0 && active->first[active->n_channels / BLOCK] == n);
    for (uint32_t b = 0; b < active->n_channels / BLOCK; ++b) {
        float largest = 0;
        CHECK(active->first[b] <= active->first[b + 1]);
        for (uint32_t i = active->first[b]; i < active->first[b + 1]; ++i) {
            CHECK(active->channels[i] / BLOCK == b && (i == 0 || active->channels[i - 1] < active->channels[i]));
            largest = fmaxf(largest, fabsf(x[active->channels[i]]));
        }
        CHECK(active->scales[b] == largest / 127);
        for (uint32_t i = active->first[b]; i < active->first[b + 1]; ++i) {
            const float inverse = largest > 0 ? 1 / active->scales[b] : 0;
            CHECK(active->values[i] == (int) roundf(x[active->channels[i]] * inverse));
        }
    }
}

static void check_above(void) {
    enum { N = 5 * BLOCK };
    llmaas_active * active = active_new(N);
    float * x = random_activation(N);
    x[7] = 2, x[8] = -2, x[9] = nextafterf(2, 0), x[10] = -0.0f;
    uint32_t n_above = 0;
    for (uint32_t j = 0; j < N; ++j) {
        n_above += fabsf(x[j]) >= 2;
    }
    llmaas_active_above(active, x, 2);
    check_active(active, x, n_above);
    for (uint32_t i = 0; i < n_above; ++i) {
        CHECK(fabsf(x[active->channels[i]]) >= 2);
    }
    llmaas_active_above(active, x, 0);
    check_active(active, x, N);
    llmaas_active_above(active, x, INFINITY);
    check_active(active, x, 0);
    memset(x, 0, N * sizeof *x);
    llmaas_active_above(active, x, 0);
    check_active(active, x, N);
    llmaas_active_free(active), free(x);
}

static int by_size(const void * a, const void * b) {
    const float p = fabsf(*(const float *) a), q = fabsf(*(const float *) b);
    return (p < q) - (p > q);
}

/* Check the k largest. n_sizes: number of distinct magnitudes, 1 and up; few of them give ties. */
static void check_top(uint32_t n_channels, uint32_t n_sizes) {
    llmaas_active * active = active_new(n_channels);
    float * x = (void *) exact(n_channels * sizeof *x), * sorted = (void *) exact(n_channels * sizeof *x);
    for (uint32_t j = 0; j < n_channels; ++j) {
        x[j] = f32_from_bits((0x3f800000u + rnd_below(n_sizes)) | (uint32_t) (rnd() % 2) << 31);
    }
    memcpy(sorted, x, n_channels * sizeof *x);
    qsort(sorted, n_channels, sizeof *x, by_size);
    for (uint32_t k = 1; k <= n_channels; k = k < n_channels ? k + 1 + k / 3 : k) {
        k = k < n_channels ? k : n_channels;
        const float least = fabsf(sorted[k - 1]);
        llmaas_active_top(active, x, k);
        check_active(active, x, k);
        uint32_t i = 0, n_above = 0, n_equal;
        for (uint32_t j = 0; j < n_channels; ++j) {
            n_above += fabsf(x[j]) > least;
        }
        n_equal = k - n_above;
        for (uint32_t j = 0; j < n_channels; ++j) {
            const bool is_first = fabsf(x[j]) == least && n_equal > 0;
            n_equal -= is_first;
            if (is_first || fabsf(x[j]) > least) {
                CHECK(i < k && active->channels[i++] == j);
            }
        }
        if (k == n_channels) {
            break;
        }
    }
    llmaas_active_top(active, x, 0);
    check_active(active, x, 0);
    llmaas_active_top(active, x, UINT32_MAX);
    check_active(active, x, n_channels);
    llmaas_active_free(active), free(x), free(sorted);
}

/* Check a value that is not finite: it is used whatever the threshold, counts as largest, and makes every row NaN, but
 * only through its own block. */
static void check_not_finite(float odd) {
    enum { N = 3 * BLOCK };
    llmaas_active * active = active_new(N);
    float * x = random_activation(N);
    x[40] = odd;
    for (int top = 0; top < 2; ++top) {
        if (top) {
            llmaas_active_top(active, x, 1);
        } else {
            llmaas_active_above(active, x, 1e30f);
        }
        CHECK(active->n == 1 && active->channels[0] == 40 && isnan(active->scales[1]) && active->scales[0] == 0);
        for (size_t of = 0; of < sizeof kinds / sizeof *kinds; ++of) {
            matrix m = matrix_new(kinds[of], 200, N, -1);
            for (size_t i = 0; i < sizeof check_isas / sizeof *check_isas; ++i) {
                if (llmaas_kernels_select(check_isas[i]) == LLMAAS_OK) {
                    float * y = multiply(&m, active, 1);
                    for (uint32_t r = 0; r < 200; ++r) {
                        CHECK(isnan(y[r]));
                    }
                    free(y);
                }
            }
            matrix_free(&m);
        }
    }
    llmaas_active_free(active), free(x);
}

/* Check values whose scale has no inverse, and the smallest values whose scale has one. */
static void check_tiny(void) {
    llmaas_active * active = active_new(2 * BLOCK);
    float x[2 * BLOCK] = {0x1p-149f, -0x1p-130f};
    x[BLOCK] = 0x1p-120f, x[BLOCK + 1] = -0x1p-121f;
    llmaas_active_above(active, x, 0x1p-149f);
    CHECK(active->n == 4 && active->values[0] == 0 && active->values[1] == 0);
    CHECK(active->values[2] == 127 && active->values[3] == -64);
    llmaas_active_free(active);
}

static void check_arguments(void) {
    llmaas_active * active;
    CHECK(llmaas_active_new(0, &active) == LLMAAS_EINVAL && llmaas_active_new(33, &active) == LLMAAS_EINVAL);
    CHECK(llmaas_active_new(32, NULL) == LLMAAS_EINVAL);
    llmaas_active_free(NULL);
}

int main(void) {
    check_arguments();
    check_above();
    check_tiny();
    check_top(BLOCK, 2), check_top(4 * BLOCK, 5), check_top(1024, 3000), check_top(1024, 1u << 29);
    check_not_finite(NAN), check_not_finite(-INFINITY), check_not_finite(INFINITY);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; ++i) {
        check_sizes(kinds[i]);
        check_extremes(kinds[i]);
    }
    return 0;
}
