/* The buffer type for claimed weights. */
#ifndef LLMAAS_BUFFER_H
#define LLMAAS_BUFFER_H

#include "weights/weights.h"

/* The buffer type, and the device that it names as its own (registry.c). */
ggml_backend_buffer_type_t        llmaas_buffers(void);
extern struct ggml_backend_device llmaas_device;

/* Return one sentence that says how this process's ggml reads the buffer type differently, or NULL. Call after
 * llmaas_abi_problem(). */
const char * llmaas_buffers_problem(void);

/* Set the owner of the buffers that this thread allocates until llmaas_buffers_end(); NULL: no owner. model: the model
 * that was loaded with them, or NULL. */
void llmaas_buffers_begin(llmaas_weights * weights);
void llmaas_buffers_end(const void * model);

#endif
