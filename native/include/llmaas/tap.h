/* Taps: C code that reads what a graph computes, on the threads that compute it.
 *
 * A tap subscribes to one kind of node. The engine adds a step of its own before that node (after it, for softmax), on
 * which every thread of the graph calls run(); all of them return before the node's successors start. Nothing is added
 * when nobody subscribes. */
#ifndef LLMAAS_TAP_H
#define LLMAAS_TAP_H

#include "llmaas/base.h"

#include "ggml.h"

typedef enum llmaas_tap_kind {
    LLMAAS_TAP_ATTENTION   = 0, /* queries against keys; once a layer */
    LLMAAS_TAP_FFN_INPUT   = 1, /* what the feed-forward block of a layer reads; once a layer */
    LLMAAS_TAP_FINAL_NORM  = 2, /* what the output matrix reads; once a graph */
    LLMAAS_TAP_ATTN_INPUT  = 3, /* what the matrices of queries, keys and values read; once a layer */
    LLMAAS_TAP_ATTN_RESULT = 4, /* what the attention's output matrix reads; once a layer */
    LLMAAS_TAP_FFN_MIDDLE  = 5, /* what ffn_down reads; once a layer, never in a mixture of experts */
} llmaas_tap_kind;

/* One node of the subscribed kind. Tensors are valid during run() only, and must not be written to. */
typedef struct llmaas_tap_view {
    llmaas_tap_kind kind;
    int             layer;    /* -1: FINAL_NORM */
    bool            is_first; /* the first node of this kind and tap in the graph */

    /* All kinds but ATTENTION: F32 [n, n_rows], of as many columns as the matrix has that reads it; FFN_INPUT of a mixture of
     * experts may be [n, 1, n_rows]. ATTN_RESULT and FFN_MIDDLE have the first columns only where the engine's level leaves out
     * the others, and the matrix does not read them; where none is left, there is no node. */
    const struct ggml_tensor * states;

    /* ATTENTION. With flash attention `node` is FLASH_ATTN_EXT: src[0] queries F32 [d, n_tokens, n_head, n_stream],
     * src[1] keys [d, n_kv, n_head_kv, n_stream], src[3] mask F16 or NULL, src[4] sinks or NULL. Without it, `node` is
     * SOFT_MAX and holds the probabilities, F32 [n_kv, n_tokens, n_head, n_stream]; src[1] is the mask. Column j
     * of keys, mask and probabilities is KV cell first_cell + j; 0 unless attention is narrowed. Heads that the engine's level
     * leaves out are not there: n_head and n_head_kv differ by layer and graph, and where none is left, there is no node. */
    const struct ggml_tensor * node;
    const struct ggml_tensor * cells;     /* I64 [n_tokens]: the KV cell each token is stored in; NULL: no KV cache */
    const struct ggml_tensor * positions; /* I32 [n_tokens]: their positions; NULL: the model uses none */
    int64_t                    first_cell;
} llmaas_tap_view;

typedef struct llmaas_tap {
    llmaas_tap_kind kind;
    void *          user;
    /* Whether the nodes of this layer are wanted now; asked for every graph, so it must be quick. NULL: always. */
    bool (*wants)(void * user, int layer);
    /* Whether a wanted node needs no run(), as positions and cells say enough; what the graph computes is not there yet.
     * Asked on the thread that starts the graph, node by node. NULL: never. */
    bool (*settles)(void * user, const llmaas_tap_view * view);
    /* Called by thread ith of nth, 0 <= ith < nth. */
    void (*run)(void * user, const llmaas_tap_view * view, int ith, int nth);
} llmaas_tap;

/* -- shipped taps ------------------------------------------------------------------------------------------------ */

/* Information density of KV positions (LLMS, Eq 1): how much attention a token gets, averaged over the queries, heads
 * and layers that can see it.
 *
 * The tap learns from the graphs it sees which token lies in which KV cell, so tokens that were evaluated before it was
 * subscribed get no density; they do take their part of every softmax. Positions are those of the evaluation: when cells
 * are filled or change hands otherwise (a state restored, a sequence relabelled), place them; when their positions move
 * (llama_memory_seq_add), reset. Of several tokens at one position, the last evaluated one counts. Nodes of several KV
 * streams (kv_unified off and more than one sequence) are not counted. */
typedef struct llmaas_density llmaas_density;

/* n_pos: positions counted, from 0. n_layer: of the model. Only layers l with l % layer_step == layer_step - 1 are looked
 * at, and one of row_step consecutive queries, others in each layer and group of heads; 1 and 1 is exact. In batches of
 * fewer than row_step, one of 4 row_step is, and counts four times. NULL: out of memory, or a step is 0. */
LLMAAS_API llmaas_density * llmaas_density_new(uint32_t n_pos, uint32_t n_layer, uint32_t row_step, uint32_t layer_step);
LLMAAS_API void             llmaas_density_free(llmaas_density * density); /* after its subscription ended */
LLMAAS_API llmaas_tap       llmaas_density_tap(llmaas_density * density);

/* Copy out, for positions 0..n-1: the sum of probabilities, and how many (query, head, layer) it was summed over. The
 * density is their ratio. A position starts again at 0 when a token is evaluated there. EINVAL: n > n_pos. */
LLMAAS_API llmaas_status llmaas_density_read(llmaas_density * density, uint32_t n, double * sums, uint64_t * counts);

/* Likewise, and start those positions again at 0. */
LLMAAS_API llmaas_status llmaas_density_take(llmaas_density * density, uint32_t n, double * sums, uint64_t * counts);

/* Instead of a cell: nobody knows it, or a restored token lies there and the next graph tells. */
enum { LLMAAS_CELL_UNKNOWN = -1, LLMAAS_CELL_RESTORED = -2 };

/* Copy out where positions 0..n-1 lie: cells[n_layer][n]. That holds as long as some sequence has these cells, so
 * whoever relabels a sequence keeps it for the day it comes back. EINVAL: n > n_pos. */
LLMAAS_API llmaas_status llmaas_density_cells(llmaas_density * density, uint32_t n, int32_t * cells);

/* Positions 0..n_kept-1 stay where they are. Everything else is forgotten and starts at 0: positions n_kept..n-1 now
 * lie in the cells that llmaas_density_cells() told, cells[n_layer][n], or (NULL) are restored next, in order of
 * position; some of them may be evaluated instead. If cells turn up that this does not explain, those positions get no
 * density. EINVAL: n_kept > n, or n > n_pos. */
LLMAAS_API llmaas_status llmaas_density_place(
    llmaas_density * density, uint32_t n_kept, uint32_t n, const int32_t * cells);

/* Forget everything: sums, counts, and where tokens are. */
LLMAAS_API void llmaas_density_reset(llmaas_density * density);

/* Hidden states, in the order the graph produced them. */
typedef struct llmaas_states llmaas_states;

/* kind: FFN_INPUT of `layer`, or FINAL_NORM (layer is ignored). Holds the newest `capacity` rows of n_embd floats. NULL:
 * out of memory, another kind, or a size is 0. */
LLMAAS_API llmaas_states * llmaas_states_new(llmaas_tap_kind kind, int layer, uint32_t n_embd, uint32_t capacity);
LLMAAS_API void            llmaas_states_free(llmaas_states * states); /* after its subscription ended */
LLMAAS_API llmaas_tap      llmaas_states_tap(llmaas_states * states);

/* Take out the oldest rows, at most n: rows[n][n_embd]. *n_taken: how many; *n_lost: rows overwritten before anybody
 * took them, or of another width, since the last call. EINVAL: a pointer is NULL. */
LLMAAS_API llmaas_status llmaas_states_take(
    llmaas_states * states, uint32_t n, float * rows, uint32_t * n_taken, uint64_t * n_lost);

/* Magnitudes of the activations that a kind's nodes read: how often they are how large, and by channel. */
typedef struct llmaas_magnitudes llmaas_magnitudes;

/* |x| lies in bucket bits(|x|) >> 17, so a bucket is 1.6 % wide or less. What is not finite is in none. */
enum { LLMAAS_MAGNITUDE_BUCKETS = 16320 };

/* kind: any but ATTENTION and FINAL_NORM. n_channels[n_layers]: values of a row; 0: the layer is not counted. Wider rows are
 * not counted either; of narrower ones, which a level leaves, what is there. NULL: out of memory, another kind, or no
 * layers. */
LLMAAS_API llmaas_magnitudes * llmaas_magnitudes_new(
    llmaas_tap_kind kind, uint32_t n_layers, const uint32_t * n_channels);
LLMAAS_API void       llmaas_magnitudes_free(llmaas_magnitudes * magnitudes); /* after its subscription ended */
LLMAAS_API llmaas_tap llmaas_magnitudes_tap(llmaas_magnitudes * magnitudes);

/* Copy out a layer's counts[LLMAAS_MAGNITUDE_BUCKETS], and its sums[n_channels] of |x| over all rows. EINVAL: the layer is
 * not counted, or a pointer is NULL. */
LLMAAS_API llmaas_status llmaas_magnitudes_read(
    llmaas_magnitudes * magnitudes, int layer, uint64_t * counts, double * sums);

/* Moments of the activations that a kind's nodes read, by channel. */
typedef struct llmaas_moments llmaas_moments;

/* As llmaas_magnitudes_new. */
LLMAAS_API llmaas_moments * llmaas_moments_new(llmaas_tap_kind kind, uint32_t n_layers, const uint32_t * n_channels);
LLMAAS_API void             llmaas_moments_free(llmaas_moments * moments); /* after its subscription ended */
LLMAAS_API llmaas_tap       llmaas_moments_tap(llmaas_moments * moments);

/* Copy out how many rows of a layer came, and sums[n_channels] of x and squares[n_channels] of x * x over them. EINVAL: the
 * layer is not counted, or a pointer is NULL. */
LLMAAS_API llmaas_status llmaas_moments_read(
    llmaas_moments * moments, int layer, uint64_t * n_rows, double * sums, double * squares);

#endif
