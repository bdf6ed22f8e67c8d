/* What ggml-cpu offers besides its backend. */
#ifndef LLMAAS_CPU_H
#define LLMAAS_CPU_H

#include "ggml-backend.h"

ggml_backend_dev_t llmaas_cpu_device(void);

/* Its buffer types for weights in other layouts, the preferred ones first, and NULL. NULL: this ggml-cpu has none. */
ggml_backend_buffer_type_t * llmaas_cpu_extra_types(void);

/* Whether it multiplies with `weight` in a buffer of `type`. */
bool llmaas_cpu_multiplies(ggml_backend_buffer_type_t type, const struct ggml_tensor * weight);

/* The CPU_REPACK buffer type; NULL: this ggml-cpu has none. */
ggml_backend_buffer_type_t llmaas_repack_type(void);
/* Whether `weight` lies in a buffer of it. */
bool llmaas_is_repacked(const struct ggml_tensor * weight);

#endif
