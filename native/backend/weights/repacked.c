#include "weights/repacked.h"

#include "base/cpu.h"
#include "weights/repacked_kernels.h"
#include "weights/repacked_rows.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = LLMAAS_REPACKED_GROUP, BATCH = LLMAAS_REPACKED_BATCH };

/* Columns of activations that are quantized at a time: a multiple of every type's block. */
enum { PIECE = 512 };

enum { LINE = 64 }; /* cache line */

/* Bytes of a group that are prefetched when groups are multiplied one by one; the processor prefetches the rest. */
enum { AHEAD = 2048 };

/* Largest quantized row that a thread keeps on its stack. */
enum { ALONE_MAX = 32 * 1024 };

/* Bytes of weight that a thread packs at a time. gemm walks over them once for each batch of activations, so both must
 * stay in a core's second-level cache. */
enum { PACKED_MAX = 192 * 1024 };

/* One product, as both of its steps need it. */
struct product {
    const llmaas_repacked_kernels * kernels;
    llmaas_rows_kernel    side_by_side; /* may be NULL */
    const struct ggml_tensor * weight;
    size_t                group_stride;
    size_t                expert_stride;
    size_t                group_size; /* bytes of the first n_cols */
    int64_t               n_groups;
    int64_t               n_cols;
    int64_t               n_experts;

    const struct ggml_tensor * input;
    const struct ggml_tensor * ids; /* NULL: MUL_MAT */
    const struct ggml_tensor * output;

    size_t row_size; /* of the quantized activations */

    /* Scratch memory: */
    char *    quantized;
    int32_t * uses;     /* MUL_MAT_ID: indices into ids, sorted by expert */
    int32_t * uses_end; /* end of each expert's indices */
};

/* Shared by the threads of the second step. */
struct work {
    struct product product;
    atomic_llong   next_group;
};

void llmaas_weight_steps(const struct ggml_tensor * weight, int64_t * row_step, int64_t * column_step) {
    *row_step    = llmaas_is_repacked(weight) ? GROUP : 1;
    *column_step = ggml_blck_size(weight->type);
}

/* -- first step: quantize the activations -------------------------------------------------------------------------- */

static int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

/* Return the number of rows that go through gemm. The other rows, and all rows of MUL_MAT_ID, go through gemv one by
 * one. */
static int64_t batched_rows(const struct product * p) {
    return p->ids ? 0 : p->input->ne[1] - p->input->ne[1] % BATCH;
}

static void quantize_batch(const struct product * p, const char * rows, char * to, int64_t n) {
    float piece[BATCH * PIECE]; /* ggml's kernel wants the rows contiguous */
    for (int r = 0; r < BATCH; ++r) {
        memcpy(piece + r * n, rows + (size_t) r * p->input->nb[1], (size_t) n * sizeof(float));
    }
    p->kernels->quantize_batch(piece, to, n);
}

static void quantize_plane(const struct product * p, const char * rows, char * to, int ith, int nth) {
    const ggml_from_float_t quantize_row = ggml_get_type_traits_cpu(p->kernels->activations)->from_float;
    const size_t            piece_size   = ggml_row_size(p->kernels->activations, PIECE);
    const int64_t           n_pieces     = (p->n_cols + PIECE - 1) / PIECE;
    const int64_t           n_batches    = batched_rows(p) / BATCH;
    const int64_t           n_items      = n_batches + p->input->ne[1] - n_batches * BATCH; /* batches, then single
                                                                                             * rows */
    for (int64_t i = ith; i < n_items * n_pieces; i += nth) {
        const int64_t item  = i / n_pieces;
        const int64_t piece = i % n_pieces;
        const int64_t n     = min_i64(PIECE, p->n_cols - piece * PIECE);
        const int64_t row   = item < n_batches ? item * BATCH : item + n_batches * (BATCH - 1);
        const char *  from  = rows + (size_t) row * p->input->nb[1] + (size_t) piece * PIECE * sizeof(float);
        char *        start = to + (size_t) row * p->row_size;
        if (item < n_batches) {
            quantize_batch(p, from, start + (size_t) piece * piece_size * BATCH, n);
        } else {
            quantize_row((const float *) (const void *) from, start + (size_t) piece * piece_size, n);
        }
    }
}

static int32_t expert_of(const struct product * p, int64_t use) {
    const struct ggml_tensor * ids = p->ids;
    int32_t                    expert;
    const char *               token = (const char *) ids->data + (size_t) (use / ids->ne[0]) * ids->nb[1];
    memcpy(&expert, token + (size_t) (use % ids->ne[0]) * ids->nb[0], sizeof expert);
    GGML_ASSERT(expert >= 0 && expert < p->n_experts);
    return expert;
}

/* Sort the uses by expert, so that a group of a weight's rows is read once for all of them. */
static void sort_uses(const struct product * p) {
    const int64_t n_uses = p->ids->ne[0] * p->ids->ne[1];
    memset(p->uses_end, 0, (size_t) p->n_experts * sizeof(int32_t));
    for (int64_t use = 0; use < n_uses; ++use) {
        ++p->uses_end[expert_of(p, use)];
    }
    int32_t start = 0;
    for (int64_t expert = 0; expert < p->n_experts; ++expert) {
        const int32_t count = p->uses_end[expert];
        p->uses_end[expert] = start; /* the start of the expert's uses; filling them in below turns it into their end */
        start += count;
    }
    for (int64_t use = 0; use < n_uses; ++use) {
        p->uses[p->uses_end[expert_of(p, use)]++] = (int32_t) use;
    }
}

static void quantize(void * arg, int ith, int nth) {
    const struct product * p = arg;
    if (ith == 0 && p->ids) {
        sort_uses(p);
    }
    for (int64_t plane = 0; plane < p->input->ne[2]; ++plane) {
        quantize_plane(p, (const char *) p->input->data + (size_t) plane * p->input->nb[2],
            p->quantized + (size_t) (plane * p->input->ne[1]) * p->row_size, ith, nth);
    }
}

/* -- second step: multiply ----------------------------------------------------------------------------------------- */

static pthread_key_t  packed_key;
static bool           packed_key_made;
static pthread_once_t packed_key_once = PTHREAD_ONCE_INIT;

struct packed {
    size_t size;
    _Alignas(LINE) char data[];
};

static void make_packed_key(void) { packed_key_made = pthread_key_create(&packed_key, free) == 0; }

/* Return memory of this thread, kept from product to product and freed with the thread. NULL if out of memory. */
static char * packed_memory(size_t size) {
    pthread_once(&packed_key_once, make_packed_key);
    if (!packed_key_made) {
        return NULL;
    }
    struct packed * packed = pthread_getspecific(packed_key);
    if (!packed || packed->size < size) {
        struct packed * larger = aligned_alloc(LINE, (sizeof *larger + size + LINE - 1) / LINE * LINE);
        if (!larger || pthread_setspecific(packed_key, larger) != 0) {
            free(larger);
            return NULL;
        }
        free(packed);
        packed       = larger;
        packed->size = size;
    }
    return packed->data;
}

static float * output_row(const struct product * p, int64_t row, int64_t plane) {
    char * start = (char *) p->output->data + (size_t) plane * p->output->nb[2];
    return (float *) (void *) (start + (size_t) row * p->output->nb[1]);
}

static bool has_gaps(const struct product * p) { return p->group_size != p->group_stride; }

/* Multiply n_groups that are contiguous with all rows of activations. */
static void multiply_packed(const struct product * p, const char * groups, int64_t first, int64_t n_groups) {
    const int64_t n_rows    = p->input->ne[1];
    const int64_t n_batched = batched_rows(p);
    const int     n         = (int) p->n_cols;
    const int     nc        = (int) (n_groups * GROUP);
    for (int64_t plane = 0; plane < p->input->ne[2]; ++plane) {
        const char * rows = p->quantized + (size_t) (plane * n_rows) * p->row_size;
        float *      to   = output_row(p, 0, plane) + first * GROUP;
        if (n_batched) {
            p->kernels->gemm(n, to, p->output->nb[1] / sizeof(float), groups, rows, (int) n_batched, nc);
        }
        for (int64_t row = n_batched; row < n_rows; ++row) {
            p->kernels->gemv(n, output_row(p, row, plane) + first * GROUP, (size_t) nc, groups,
                rows + (size_t) row * p->row_size, 1, nc);
        }
    }
}

/* Copy a stretch of each group in turn: like the parallel kernels, this reads memory at full speed. */
static void pack(const struct product * p, char * packed, const char * groups, int64_t n_groups) {
    enum { STRETCH = 512 };
    for (size_t at = 0; at < p->group_size; at += STRETCH) {
        const size_t n = p->group_size - at < STRETCH ? p->group_size - at : STRETCH;
        for (size_t i = 0; i < (size_t) n_groups; ++i) {
            memcpy(packed + i * p->group_size + at, groups + i * p->group_stride + at, n);
        }
    }
}

static void multiply_batches(const struct product * p, const char * groups, int64_t first, int64_t n_groups) {
    char * packed = packed_memory((size_t) n_groups * p->group_size);
    if (packed) {
        pack(p, packed, groups, n_groups);
        multiply_packed(p, packed, first, n_groups);
        return;
    }
    for (int64_t i = 0; i < n_groups; ++i) {
        multiply_packed(p, groups + (size_t) i * p->group_stride, first + i, 1);
    }
}

static void prefetch(const char * bytes, size_t n) {
    for (size_t at = 0; at < n; at += LINE) {
        __builtin_prefetch(bytes + at, 0, 2);
    }
}

/* Multiply n_groups in place with one row of activations. The groups to multiply next are `ahead` bytes behind
 * these. */
static void multiply_row(
    const struct product * p, const char * groups, int64_t n_groups, size_t ahead, int64_t row, float * to) {
    const char * activations = p->quantized + (size_t) row * p->row_size;
    if (!has_gaps(p)) {
        p->kernels->gemv((int) p->n_cols, to, 0, groups, activations, 1, (int) (n_groups * GROUP));
    } else if (p->side_by_side && n_groups == LLMAAS_STREAMS) {
        p->side_by_side((int) p->n_cols, to, groups, p->group_stride, ahead, activations);
    } else {
        for (int64_t i = 0; i < n_groups; ++i) {
            const char * group = groups + (size_t) i * p->group_stride;
            prefetch(group + p->group_stride, p->group_size < AHEAD ? p->group_size : AHEAD);
            p->kernels->gemv((int) p->n_cols, to + i * GROUP, 0, group, activations, 1, GROUP);
        }
    }
}

static void multiply_rows(
    const struct product * p, const char * groups, int64_t first, int64_t n_groups, size_t ahead) {
    for (int64_t plane = 0; plane < p->input->ne[2]; ++plane) {
        for (int64_t row = 0; row < p->input->ne[1]; ++row) {
            multiply_row(
                p, groups, n_groups, ahead, plane * p->input->ne[1] + row, output_row(p, row, plane) + first * GROUP);
        }
    }
}

static void multiply_uses(
    const struct product * p, const char * groups, int64_t first, int64_t n_groups, size_t ahead) {
    const int64_t n_used = p->ids->ne[0];
    int32_t       i      = 0;
    for (int64_t expert = 0; expert < p->n_experts; ++expert) {
        for (; i < p->uses_end[expert]; ++i) {
            const int64_t use   = p->uses[i] % n_used;
            const int64_t token = p->uses[i] / n_used;
            multiply_row(p, groups + (size_t) expert * p->expert_stride, n_groups, ahead,
                token * p->input->ne[1] + use % p->input->ne[1], output_row(p, use, token) + first * GROUP);
        }
    }
}

static void multiply_chunk(const struct product * p, int64_t first, int64_t n_groups) {
    const char * groups = (const char *) p->weight->data + (size_t) first * p->group_stride;
    if (!p->ids && !has_gaps(p)) {
        multiply_packed(p, groups, first, n_groups);
        return;
    }
    if (batched_rows(p)) {
        multiply_batches(p, groups, first, n_groups);
        return;
    }
    for (int64_t i = 0; i < n_groups; i += LLMAAS_STREAMS) {
        const int64_t n     = min_i64(LLMAAS_STREAMS, n_groups - i);
        const size_t  ahead = i + n < n_groups ? (size_t) n * p->group_stride : 0;
        (p->ids ? multiply_uses : multiply_rows)(p, groups + (size_t) i * p->group_stride, first + i, n, ahead);
    }
}

/* Return how many of n_left groups a thread takes at a time. For batches, groups are packed, and gemm is fastest with
 * an even number. Without batches, each take has a start-up cost, so a thread takes half of its share of what is left:
 * large parts first, small ones last. */
static int64_t chunk_groups(const struct product * p, int64_t n_left, int nth) {
    const int64_t step = batched_rows(p) ? 2 : LLMAAS_STREAMS;
    const int64_t n    = batched_rows(p) ? min_i64(p->n_groups / (nth * 4), (int64_t) (PACKED_MAX / p->group_size))
                                         : n_left / (nth * 2);
    return min_i64(n > step ? n - n % step : step, n_left);
}

static void multiply_chunks(const struct product * p, atomic_llong * next_group, int nth) {
    long long first = atomic_load_explicit(next_group, memory_order_relaxed);
    while (first < p->n_groups) {
        const int64_t n = chunk_groups(p, p->n_groups - first, nth);
        if (atomic_compare_exchange_weak_explicit(
                next_group, &first, first + n, memory_order_relaxed, memory_order_relaxed)) {
            multiply_chunk(p, first, n);
            first = atomic_load_explicit(next_group, memory_order_relaxed);
        }
    }
}

static void multiply(void * arg, int ith, int nth) {
    struct work * work = arg;
    (void) ith;
    multiply_chunks(&work->product, &work->next_group, nth);
}

/* Run both steps in one for a single row: quantizing it takes less time than waiting for a thread that does. */
static void multiply_alone(void * arg, int ith, int nth) {
    struct work * work = arg;
    (void) ith;
    _Alignas(LINE) char quantized[ALONE_MAX];
    struct product      product = work->product;
    product.quantized           = quantized;
    quantize_plane(&product, product.input->data, quantized, 0, 1);
    multiply_chunks(&product, &work->next_group, nth);
}

/* -- a product ----------------------------------------------------------------------------------------------------- */

static struct product product_of(const llmaas_repacked_kernels * kernels, const struct ggml_tensor * weight,
    const struct ggml_tensor * node, int64_t n_rows, int64_t n_cols) {
    return (struct product) {
        .kernels       = kernels,
        .side_by_side  = llmaas_rows_kernel_of(kernels->type),
        .weight        = weight,
        .group_stride  = weight->nb[1] * GROUP,
        .expert_stride = weight->nb[2],
        .group_size    = ggml_row_size(weight->type, n_cols) * GROUP,
        .n_groups      = n_rows / GROUP,
        .n_cols        = n_cols,
        .n_experts     = weight->ne[2],
        .input         = node->src[1],
        .ids           = llmaas_op_of(node) == LLMAAS_OP_MUL_MAT_ID ? node->src[2] : NULL,
        .output        = node,
        .row_size      = ggml_row_size(kernels->activations, n_cols),
    };
}

bool llmaas_repacked_columns(
    llmaas_graph * graph, const struct ggml_tensor * weight, struct ggml_tensor * node, int64_t n_rows, int64_t n_cols) {
    struct work      work     = {.product = product_of(llmaas_repacked_kernels_of(weight->type), weight, node, n_rows, n_cols)};
    struct product * p        = &work.product;
    const int64_t    n_inputs = p->input->ne[1] * p->input->ne[2];
    if (!p->ids && n_inputs == 1 && p->row_size <= ALONE_MAX) {
        return llmaas_graph_step(graph, multiply_alone, &work, sizeof work);
    }
    p->quantized = llmaas_graph_scratch(graph, 2, (size_t) n_inputs * p->row_size);
    if (p->ids) {
        const int64_t n_uses = p->ids->ne[0] * p->ids->ne[1];
        p->uses     = llmaas_graph_scratch(graph, 3, (size_t) (n_uses + p->n_experts) * sizeof(int32_t));
        p->uses_end = p->uses ? p->uses + n_uses : NULL;
    }
    return p->quantized && (!p->ids || p->uses) && llmaas_graph_step(graph, quantize, p, sizeof *p) &&
           llmaas_graph_step(graph, multiply, &work, sizeof work);
}
