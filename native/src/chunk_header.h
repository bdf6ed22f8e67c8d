/* Writing the chunk header; layout in llmaas/chunk.h. */
#ifndef LLMAAS_CHUNK_HEADER_H
#define LLMAAS_CHUNK_HEADER_H

#include "llmaas/chunk.h"

/* Fill in the header, CRCs included, in front of a complete body. plane_bytes: size of each of the last info->bits
 * planes. */
void llmaas_chunk_seal(uint8_t * payload, const llmaas_chunk_info * info, uint64_t plane_bytes, const uint8_t * key);

#endif
