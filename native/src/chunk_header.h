/* The chunk header's fields; layout in llmaas/chunk.h. */
#ifndef LLMAAS_CHUNK_HEADER_H
#define LLMAAS_CHUNK_HEADER_H

#include "llmaas/chunk.h"

/* Fill a header, crc included, in front of a complete body. */
void llmaas_chunk_seal(uint8_t * payload, const llmaas_chunk_info * info, const uint8_t * key);

#endif
