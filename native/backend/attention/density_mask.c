/* Which cells a query sees, and what the mask adds to their scores. */
#include "attention/density_worker.h"
#include "attention/mask.h"

#include "ggml-cpu.h"

bool llmaas_attention_sees(const llmaas_attention * node, int64_t row, int64_t cell) {
    const struct ggml_tensor * mask = node->mask;
    const int64_t              column = cell - node->first_cell;
    if (column < 0 || column >= node->n_kv) {
        return false;
    }
    if (!mask) {
        return true;
    }
    const char * from = (const char *) mask->data + (size_t) row * mask->nb[1];
    return llmaas_mask_bits(from, ggml_type_size(mask->type), column) != llmaas_mask_hidden_bits(mask->type);
}

static void find_runs(llmaas_density_worker * w, const char * mask, enum ggml_type type, int64_t n) {
    const size_t   size   = ggml_type_size(type);
    const uint32_t masked = llmaas_mask_hidden_bits(type);
    const uint64_t word   = llmaas_mask_hidden(type);
    for (int64_t column = 0; column < n;) {
        column = llmaas_mask_skip(mask, size, column, n, word);
        while (column < n && llmaas_mask_bits(mask, size, column) == masked) {
            ++column;
        }
        const int64_t start = column;
        while (column < n && llmaas_mask_bits(mask, size, column) != masked) {
            const int64_t next = llmaas_mask_skip(mask, size, column, n, 0);
            w->has_bias        = w->has_bias || (next == column && llmaas_mask_bits(mask, size, column));
            column             = next > column ? next : column + 1;
        }
        if (column > start) {
            w->runs[w->n_runs++] = (int32_t) start;
            w->runs[w->n_runs++] = (int32_t) column;
        }
    }
}

void llmaas_density_find_visible(
    llmaas_density_worker * w, const llmaas_attention * node, int64_t row, int64_t head) {
    const struct ggml_tensor * mask      = node->mask;
    const int64_t              mask_head = mask ? head % mask->ne[2] : 0;
    if (w->row == row && w->mask_head == mask_head) {
        return;
    }
    w->row       = row;
    w->mask_head = mask_head;
    w->n_runs    = 0;
    w->has_bias  = false;
    if (!mask) {
        w->runs[w->n_runs++] = 0;
        w->runs[w->n_runs++] = (int32_t) node->n_kv;
        return;
    }
    const char * from = (const char *) mask->data + (size_t) row * mask->nb[1] + (size_t) mask_head * mask->nb[2];
    find_runs(w, from, mask->type, node->n_kv);
    if (w->has_bias && node->is_flash) {
        ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) (const void *) from, w->bias, node->n_kv);
    }
}
