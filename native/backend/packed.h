/* Weights in the layout that ggml-cpu repacks them to, in memory or in files of ours. */
#ifndef LLMAAS_PACKED_H
#define LLMAAS_PACKED_H

#include "ggml.h"

/* Make products take the bytes of `weight` for repacked ones. False, and nothing is changed: ggml-cpu repacks no weight of
 * this type and shape. */
bool llmaas_packed_mark(struct ggml_tensor * weight);

#endif
