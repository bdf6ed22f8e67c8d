/* Capabilities of ggml-cpu beyond its backend. */
#ifndef LLMAAS_CPU_H
#define LLMAAS_CPU_H

#include "ggml-backend.h"

ggml_backend_dev_t llmaas_cpu_device(void);

/* Return ggml-cpu's buffer types for weights in other layouts, preferred ones first, ended by NULL. NULL if this
 * ggml-cpu has none. */
ggml_backend_buffer_type_t * llmaas_cpu_extra_types(void);

/* Return whether ggml-cpu can multiply with `weight` in a buffer of `type`. */
bool llmaas_cpu_multiplies(ggml_backend_buffer_type_t type, const struct ggml_tensor * weight);

/* Return the CPU_REPACK buffer type; NULL if this ggml-cpu has none. */
ggml_backend_buffer_type_t llmaas_repack_type(void);
/* Return whether `weight` lies in a CPU_REPACK buffer. */
bool llmaas_is_repacked(const struct ggml_tensor * weight);

#endif
