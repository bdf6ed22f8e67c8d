/* Our buffer type. */
#ifndef LLMAAS_BUFFER_H
#define LLMAAS_BUFFER_H

#include "weights.h"

/* The type; it names `device` as its own. */
ggml_backend_buffer_type_t llmaas_buffers(ggml_backend_dev_t device);

/* Whose tensors the buffers are for that this thread allocates from now on; NULL: nobody's. */
void llmaas_buffers_belong_to(llmaas_weights * weights);

#endif
