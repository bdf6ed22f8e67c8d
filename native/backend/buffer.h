/* The buffer type for claimed weights. */
#ifndef LLMAAS_BUFFER_H
#define LLMAAS_BUFFER_H

#include "weights.h"

/* The buffer type, and the device that it names as its own (registry.c). */
ggml_backend_buffer_type_t        llmaas_buffers(void);
extern struct ggml_backend_device llmaas_device;

/* Set the owner of the buffers that this thread allocates from now on; NULL: no owner. */
void llmaas_buffers_belong_to(llmaas_weights * weights);

#endif
