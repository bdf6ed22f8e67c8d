/* Taps: C code that reads what a graph computes, on the threads that compute it.
 *
 * A tap subscribes to one kind of node. The engine adds a step before that node (after it for softmax), in which every
 * thread of the graph calls run(). All calls return before the node's successors start. Without subscribers nothing is
 * added. */
#ifndef LLMAAS_TAP_H
#define LLMAAS_TAP_H

#include "llmaas/base.h"

#include "ggml.h"

typedef enum llmaas_tap_kind {
    LLMAAS_TAP_ATTENTION   = 0, /* queries and keys; once per layer */
    LLMAAS_TAP_FFN_INPUT   = 1, /* input of a layer's feed-forward block; once per layer */
    LLMAAS_TAP_FINAL_NORM  = 2, /* input of the output matrix; once per graph */
    LLMAAS_TAP_ATTN_INPUT  = 3, /* input of the query, key and value matrices; once per layer */
    LLMAAS_TAP_ATTN_RESULT = 4, /* input of the attention's output matrix; once per layer */
    LLMAAS_TAP_FFN_MIDDLE  = 5, /* input of ffn_down; once per layer, never in a mixture of experts */
} llmaas_tap_kind;

/* One node of the subscribed kind. Its tensors are valid during run() only, and must not be written to. */
typedef struct llmaas_tap_view {
    llmaas_tap_kind kind;
    int             layer;    /* -1 for FINAL_NORM */
    bool            is_first; /* the first node of this kind in the graph, for this tap */

    /* For all kinds but ATTENTION: F32 [n, n_rows], with as many columns as the matrix that reads it. FFN_INPUT of a
     * mixture of experts may be [n, 1, n_rows]. If the engine's level leaves out columns, the matrix does not read
     * those, and ATTN_RESULT and FFN_MIDDLE have the first columns only. If no column is left, there is no node. */
    const struct ggml_tensor * states;

    /* For ATTENTION. With flash attention, `node` is FLASH_ATTN_EXT: src[0] queries F32 [d, n_tokens, n_head,
     * n_stream], src[1] keys [d, n_kv, n_head_kv, n_stream], src[3] mask F16 or NULL, src[4] sinks or NULL. Without
     * flash attention, `node` is SOFT_MAX and holds the probabilities, F32 [n_kv, n_tokens, n_head, n_stream]; src[1]
     * is the mask. Column j of keys, mask and probabilities is KV cell first_cell + j; first_cell is 0 unless attention
     * is narrowed. Heads that the engine's level leaves out are missing, so n_head and n_head_kv differ by layer and
     * graph. If no head is left, there is no node. */
    const struct ggml_tensor * node;
    const struct ggml_tensor * cells;     /* I64 [n_tokens]: the KV cell that each token is stored in; NULL if there is
                                           * no KV cache */
    const struct ggml_tensor * positions; /* I32 [n_tokens]: the tokens' positions; NULL if the model uses none */
    int64_t                    first_cell;
} llmaas_tap_view;

typedef struct llmaas_tap {
    llmaas_tap_kind kind;
    void *          user;
    /* Return whether the nodes of this layer are wanted now. Called for every graph, so it must be quick. NULL:
     * always. */
    bool (*wants)(void * user, int layer);
    /* Return whether a wanted node needs no run() because positions and cells suffice; the graph has computed nothing
     * yet. Called on the thread that starts the graph, node by node. NULL: never. */
    bool (*settles)(void * user, const llmaas_tap_view * view);
    /* Process a node; called by thread ith of nth, 0 <= ith < nth. */
    void (*run)(void * user, const llmaas_tap_view * view, int ith, int nth);
} llmaas_tap;

/* -- shipped taps ------------------------------------------------------------------------------------------------ */

/* Information density of KV positions (LLMS, Eq. 1): how much attention a token gets, averaged over the queries, heads
 * and layers that can see it.
 *
 * The tap learns from the graphs that it sees which token lies in which KV cell. Tokens evaluated before it was
 * subscribed get no density, though they take their share of every softmax. Positions are those at evaluation time.
 * When cells are filled or reassigned otherwise (a state restored, a sequence relabeled), call llmaas_density_place().
 * When positions move (llama_memory_seq_add), call llmaas_density_reset(). If several tokens share a position, the last
 * evaluated one counts. Nodes of several KV streams (kv_unified off and more than one sequence) are not counted. */
typedef struct llmaas_density llmaas_density;

/* Create a density tap. n_pos: positions counted, from 0. n_layer: layers of the model. Only layers l with l %
 * layer_step == layer_step - 1 are sampled, and in each one of row_step consecutive queries; which query differs by
 * layer and group of heads. Steps of 1 and 1 are exact. In batches of fewer than row_step queries, one of 4 row_step is
 * sampled and counts four times. NULL if out of memory or a step is 0. */
LLMAAS_API llmaas_density * llmaas_density_new(uint32_t n_pos, uint32_t n_layer, uint32_t row_step, uint32_t layer_step);
LLMAAS_API void             llmaas_density_free(llmaas_density * density); /* only after its subscription ended */
LLMAAS_API llmaas_tap       llmaas_density_tap(llmaas_density * density);

/* Copy out, for positions 0..n-1, the sum of probabilities and the number of (query, head, layer) triples summed. Their
 * ratio is the density. Both restart at 0 when a token is evaluated at the position. EINVAL: n > n_pos. */
LLMAAS_API llmaas_status llmaas_density_read(llmaas_density * density, uint32_t n, double * sums, uint64_t * counts);

/* Copy out the same, and reset those positions to 0. */
LLMAAS_API llmaas_status llmaas_density_take(llmaas_density * density, uint32_t n, double * sums, uint64_t * counts);

/* Values in place of a cell: the cell is unknown; or a restored token lies there, and the next graph shows where. */
enum { LLMAAS_CELL_UNKNOWN = -1, LLMAAS_CELL_RESTORED = -2 };

/* Copy out where positions 0..n-1 lie: cells[n_layer][n]. The answer holds as long as some sequence has these cells. A
 * caller that relabels a sequence can save it for when the sequence comes back. EINVAL: n > n_pos. */
LLMAAS_API llmaas_status llmaas_density_cells(llmaas_density * density, uint32_t n, int32_t * cells);

/* Keep positions 0..n_kept-1; forget all others and restart them at 0. Positions n_kept..n-1 now lie in `cells`,
 * [n_layer][n], as llmaas_density_cells() returned them. With NULL they are restored next, in order of position; some
 * of them may be evaluated instead. If cells turn up that this does not explain, those positions get no density.
 * EINVAL: n_kept > n, or n > n_pos. */
LLMAAS_API llmaas_status llmaas_density_place(
    llmaas_density * density, uint32_t n_kept, uint32_t n, const int32_t * cells);

/* Forget everything: sums, counts, and where tokens lie. */
LLMAAS_API void llmaas_density_reset(llmaas_density * density);

/* Hidden states, in the order in which the graph produced them. */
typedef struct llmaas_hidden_states llmaas_hidden_states;

/* Create a tap of hidden states that holds the newest `capacity` rows of n_embd floats. kind: FFN_INPUT of `layer`, or
 * FINAL_NORM (layer is ignored). NULL if out of memory, for any other kind, or if a size is 0. */
LLMAAS_API llmaas_hidden_states * llmaas_hidden_states_new(llmaas_tap_kind kind, int layer, uint32_t n_embd, uint32_t capacity);
LLMAAS_API void            llmaas_hidden_states_free(llmaas_hidden_states * states); /* only after its subscription ended */
LLMAAS_API llmaas_tap      llmaas_hidden_states_tap(llmaas_hidden_states * states);

/* Take out the oldest rows, at most n, into rows[n][n_embd]. *n_taken: rows taken. *n_lost: rows since the last call
 * that were overwritten before anybody took them, or had another width. EINVAL: a pointer is NULL. */
LLMAAS_API llmaas_status llmaas_hidden_states_take(
    llmaas_hidden_states * states, uint32_t n, float * rows, uint32_t * n_taken, uint64_t * n_lost);

/* Magnitudes of the activations that a kind's nodes read: a histogram, and sums by channel. */
typedef struct llmaas_magnitudes llmaas_magnitudes;

/* |x| is counted in bucket bits(|x|) >> 17, so a bucket is at most 1.6 % wide. Values that are not finite are not
 * counted. */
enum { LLMAAS_MAGNITUDE_BUCKETS = 16320 };

/* Create a tap of magnitudes. kind: any but ATTENTION and FINAL_NORM. n_channels[n_layers]: values per row; 0: the
 * layer is not counted. Wider rows are not counted either. In narrower rows, which a level produces, the present values
 * are counted. NULL if out of memory, for an unsupported kind, or if n_layers is 0. */
LLMAAS_API llmaas_magnitudes * llmaas_magnitudes_new(
    llmaas_tap_kind kind, uint32_t n_layers, const uint32_t * n_channels);
LLMAAS_API void       llmaas_magnitudes_free(llmaas_magnitudes * magnitudes); /* only after its subscription ended */
LLMAAS_API llmaas_tap llmaas_magnitudes_tap(llmaas_magnitudes * magnitudes);

/* Copy out a layer's counts[LLMAAS_MAGNITUDE_BUCKETS], and sums[n_channels] of |x| over all rows. EINVAL: the layer is
 * not counted, or a pointer is NULL. */
LLMAAS_API llmaas_status llmaas_magnitudes_read(
    llmaas_magnitudes * magnitudes, int layer, uint64_t * counts, double * sums);

/* Moments, by channel, of the activations that a kind's nodes read. */
typedef struct llmaas_moments llmaas_moments;

/* Create a tap of moments; arguments as for llmaas_magnitudes_new(). */
LLMAAS_API llmaas_moments * llmaas_moments_new(llmaas_tap_kind kind, uint32_t n_layers, const uint32_t * n_channels);
LLMAAS_API void             llmaas_moments_free(llmaas_moments * moments); /* only after its subscription ended */
LLMAAS_API llmaas_tap       llmaas_moments_tap(llmaas_moments * moments);

/* Copy out how many rows of a layer were counted, and sums[n_channels] of x and squares[n_channels] of x * x over them.
 * EINVAL: the layer is not counted, or a pointer is NULL. */
LLMAAS_API llmaas_status llmaas_moments_read(
    llmaas_moments * moments, int layer, uint64_t * n_rows, double * sums, double * squares);

/* Overlap of an activation's large values in a layer with those in an earlier layer that predicts it. */
typedef struct llmaas_overlap llmaas_overlap;

enum { LLMAAS_MAX_THRESHOLDS = 32 };

/* Create a tap of overlap. kind and n_channels: as for llmaas_magnitudes_new(). predictors[n_layers]: an earlier layer of
 * the same width; -1: nothing predicts the layer. thresholds[n_layers][n_thresholds]: magnitudes from which values count
 * as large. NULL also if there are too many thresholds, or a predictor is none. */
LLMAAS_API llmaas_overlap * llmaas_overlap_new(
    llmaas_tap_kind kind, uint32_t n_layers, const uint32_t * n_channels, const int32_t * predictors, uint32_t n_thresholds,
    const float * thresholds);
LLMAAS_API void       llmaas_overlap_free(llmaas_overlap * overlap); /* only after its subscription ended */
LLMAAS_API llmaas_tap llmaas_overlap_tap(llmaas_overlap * overlap);

/* Copy out, for each threshold, how many of a layer's values reached it (used[n_thresholds]), and how many of these did
 * so in the predictor, too (both[n_thresholds]). Only rows that the predictor also has are counted, at full width.
 * EINVAL: the layer is not counted, or a pointer is NULL. */
LLMAAS_API llmaas_status llmaas_overlap_read(llmaas_overlap * overlap, int layer, uint64_t * used, uint64_t * both);

#endif
