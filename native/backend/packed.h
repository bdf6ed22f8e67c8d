/* Weights in ggml-cpu's repacked layout, in memory or in our own files. */
#ifndef LLMAAS_PACKED_H
#define LLMAAS_PACKED_H

#include "ggml.h"

/* Mark the bytes of `weight` as repacked, so that products read them that way. False, with no change, if ggml-cpu
 * repacks no weight of this type and shape. */
bool llmaas_packed_mark(struct ggml_tensor * weight);

#endif
