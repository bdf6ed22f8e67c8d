/* Our buffer type. */
#ifndef LLMAAS_BUFFER_H
#define LLMAAS_BUFFER_H

#include "weights.h"

/* The type, and the device that it names as its own (registry.c). */
ggml_backend_buffer_type_t        llmaas_buffers(void);
extern struct ggml_backend_device llmaas_device;

/* Whose tensors the buffers are for that this thread allocates from now on; NULL: nobody's. */
void llmaas_buffers_belong_to(llmaas_weights * weights);

#endif
