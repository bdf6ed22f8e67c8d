/* Reading attention masks, which hold 0, minus infinity, or distances (ALiBi), as F16 or F32. */
#include "attention/density_worker.h"

#include "ggml-cpu.h"

#include <string.h>

static uint32_t mask_bits(const char * mask, size_t size, int64_t column) {
    uint32_t bits = 0;
    memcpy(&bits, mask + (size_t) column * size, size); /* little endian: the first bytes are the lower ones */
    return bits;
}

static uint32_t masked_bits(enum ggml_type type) { return type == GGML_TYPE_F16 ? 0xfc00 : 0xff800000; }

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
    return mask_bits(from, ggml_type_size(mask->type), column) != masked_bits(mask->type);
}

/* Return the first column from `column` on whose word differs from `word`; it may stop short of the row's last
 * columns. */
static int64_t skip_words(const char * mask, size_t size, int64_t column, int64_t n, uint64_t word) {
    const int64_t step = (int64_t) (sizeof word / size);
    for (; column + step <= n; column += step) {
        uint64_t found;
        memcpy(&found, mask + (size_t) column * size, sizeof found);
        if (found != word) {
            break;
        }
    }
    return column;
}

static void find_runs(llmaas_density_worker * w, const char * mask, enum ggml_type type, int64_t n) {
    const size_t   size   = ggml_type_size(type);
    const uint32_t masked = masked_bits(type);
    const uint64_t word   = type == GGML_TYPE_F16 ? 0xfc00fc00fc00fc00ull : 0xff800000ff800000ull;
    for (int64_t column = 0; column < n;) {
        column = skip_words(mask, size, column, n, word);
        while (column < n && mask_bits(mask, size, column) == masked) {
            ++column;
        }
        const int64_t start = column;
        while (column < n && mask_bits(mask, size, column) != masked) {
            const int64_t next = skip_words(mask, size, column, n, 0);
            w->has_bias        = w->has_bias || (next == column && mask_bits(mask, size, column));
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
