/* Weights in ggml-cpu's repacked layout, in memory or in our own files. */
#ifndef LLMAAS_REPACK_H
#define LLMAAS_REPACK_H

#include "ggml.h"

/* Mark the bytes of `weight` as repacked, so that products read them that way. False, with no change, if ggml-cpu
 * repacks no weight of this type and shape. */
bool llmaas_repack_mark(struct ggml_tensor * weight);

#endif
