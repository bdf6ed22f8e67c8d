/* llama_state_seq_set_data finds cells for a blob's rows, labels them, and then hands each piece of the blob to the
 * buffer that holds the cells. For one such call, we replace that buffer's set_tensor function by one that only notes
 * where the pieces should go. Rows can then be decoded straight to their place, and the blob needs memory for its
 * headers only. */
#include "attention/cells.h"

typedef void set_tensor_fn(
    ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, const void * data, size_t offset, size_t n_bytes);

typedef struct notes {
    const uint8_t *            blob;
    uint64_t                   n_bytes;
    set_tensor_fn *            original;
    const struct ggml_tensor * tensor; /* of the last piece */
    const uint8_t *            next;   /* the blob's bytes behind that piece */
    uint8_t *                  last;   /* where that piece belongs */
    llmaas_landing *           landings;
    uint32_t                   n_most, n;
    bool                       is_regular;
} notes;

static _Thread_local notes * noting;

static bool begin_landing(notes * taken, uint8_t * place, uint64_t n_bytes) {
    if (taken->n == taken->n_most) {
        return false;
    }
    taken->landings[taken->n++] = (llmaas_landing) {place, 0, n_bytes, 1};
    return true;
}

/* Note another piece of the same tensor. False unless it is as far from the last piece as that was from the one
 * before. */
static bool go_on(const notes * taken, const uint8_t * place, uint64_t n_bytes) {
    llmaas_landing * landing = &taken->landings[taken->n - 1];
    if (place <= taken->last || n_bytes != landing->n_bytes) {
        return false;
    }
    const uint64_t step = (uint64_t) (place - taken->last);
    if (landing->n_pieces == 1) {
        landing->step = step;
    }
    landing->n_pieces++;
    return step == landing->step;
}

static void note(notes * taken, const struct ggml_tensor * tensor, const uint8_t * from, size_t offset, size_t n_bytes) {
    uint8_t *  place    = (uint8_t *) tensor->data + offset;
    const bool is_first = tensor != taken->tensor;
    taken->is_regular = taken->is_regular && (is_first ? from >= taken->next : from == taken->next) &&
                        (is_first ? begin_landing(taken, place, n_bytes) : go_on(taken, place, n_bytes));
    taken->tensor = tensor;
    taken->next   = from + n_bytes;
    taken->last   = place;
}

static void set_tensor(
    ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, const void * data, size_t offset, size_t n_bytes) {
    const uintptr_t at = (uintptr_t) data, blob = (uintptr_t) noting->blob;
    if (at >= blob && at - blob < noting->n_bytes) {
        note(noting, tensor, data, offset, n_bytes);
    } else {
        noting->original(buffer, tensor, data, offset, n_bytes);
    }
}

llmaas_status llmaas_cells_land(llmaas_cells * cells, llmaas_set_data set_data, void * ctx, int32_t sequence,
                                const uint8_t * blob, uint64_t n_bytes, llmaas_landing * landings, uint32_t n_landings) {
    if (!cells->buffer || !cells->is_whole || !ggml_backend_buffer_is_host(cells->buffer)) {
        return LLMAAS_EUNSUPPORTED;
    }
    notes taken = {
        .blob = blob, .n_bytes = n_bytes, .original = cells->buffer->iface.set_tensor, .next = blob,
        .landings = landings, .n_most = n_landings, .is_regular = true,
    };
    noting = &taken;
    cells->buffer->iface.set_tensor = set_tensor;
    const size_t n_read = set_data(ctx, blob, n_bytes, sequence);
    cells->buffer->iface.set_tensor = taken.original;
    noting = NULL;
    const bool is_whole    = n_read == n_bytes && taken.is_regular && taken.n == n_landings;
    const bool is_in_a_row = taken.n > 0 && landings[0].n_pieces == 1; /* keys are not transposed, so one piece per
                                                                        * contiguous run */
    return is_whole && is_in_a_row ? LLMAAS_OK : LLMAAS_EUNSUPPORTED;
}
