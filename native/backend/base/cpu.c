#include "base/cpu.h"

#include "base/abi.h"
#include "ggml-cpu.h"

#include <pthread.h>
#include <string.h>

ggml_backend_dev_t llmaas_cpu_device(void) { return ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0); }

ggml_backend_buffer_type_t * llmaas_cpu_extra_types(void) {
    const ggml_backend_dev_get_extra_bufts_t types =
        (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
            ggml_backend_cpu_reg(), "ggml_backend_dev_get_extra_bufts");
    return types ? types(llmaas_cpu_device()) : NULL;
}

bool llmaas_cpu_multiplies(ggml_backend_buffer_type_t type, const struct ggml_tensor * weight) {
    struct ggml_backend_buffer buffer  = {.buft = type};
    struct ggml_tensor         there   = *weight;
    struct ggml_tensor         x       = {.type = GGML_TYPE_F32, .ne = {weight->ne[0], 4, 1, 1}};
    struct ggml_tensor         product = {.type = GGML_TYPE_F32, .ne = {weight->ne[1], 4, 1, 1}, .src = {&there, &x}};
    there.buffer = &buffer;
    product.op   = llmaas_op_number(weight->ne[2] > 1 ? LLMAAS_OP_MUL_MAT_ID : LLMAAS_OP_MUL_MAT);
    return ggml_backend_dev_supports_op(llmaas_cpu_device(), &product);
}

static ggml_backend_buffer_type_t repack_type;
static pthread_once_t             repack_type_once = PTHREAD_ONCE_INIT;

static void find_repack_type(void) {
    for (ggml_backend_buffer_type_t * type = llmaas_cpu_extra_types(); type && *type; ++type) {
        if (strcmp(ggml_backend_buft_name(*type), "CPU_REPACK") == 0) {
            repack_type = *type;
        }
    }
}

ggml_backend_buffer_type_t llmaas_repack_type(void) {
    pthread_once(&repack_type_once, find_repack_type);
    return repack_type;
}

bool llmaas_is_repacked(const struct ggml_tensor * weight) {
    const ggml_backend_buffer_type_t type = llmaas_repack_type();
    return type && weight->buffer && ggml_backend_buffer_get_type(weight->buffer) == type;
}
