/* Names, shapes and offsets of a model file's tensors. */
#include "llmaas/engine.h"

#include "gguf.h"

#include <stdlib.h>
#include <string.h>

static void describe(const struct gguf_context * gguf, int64_t i, llmaas_tensor_info * info) {
    memset(info, 0, sizeof *info);
    strncpy(info->name, gguf_get_tensor_name(gguf, i), sizeof info->name - 1);
    info->type    = gguf_get_tensor_type(gguf, i);
    memcpy(info->ne, gguf_get_tensor_ne(gguf, i), sizeof info->ne);
    info->n_bytes = gguf_get_tensor_size(gguf, i);
    info->offset  = gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, i);
}

llmaas_status llmaas_gguf_tensors(const char * path, llmaas_tensor_info ** infos, uint32_t * n) {
    struct gguf_context * gguf = gguf_init_from_file(path, (struct gguf_init_params) {.no_alloc = true});
    if (!gguf) {
        return LLMAAS_EINVAL;
    }
    *n     = (uint32_t) gguf_get_n_tensors(gguf);
    *infos = calloc(*n ? *n : 1, sizeof **infos);
    for (uint32_t i = 0; *infos && i < *n; i++) {
        describe(gguf, i, &(*infos)[i]);
    }
    gguf_free(gguf);
    return *infos ? LLMAAS_OK : LLMAAS_ESPACE;
}

void llmaas_gguf_tensors_free(llmaas_tensor_info * infos) { free(infos); }
