/* Batched file I/O for chunk payloads. Extents start on 4 KiB boundaries, and take whole 4 KiB blocks. Neighbours travel
 * together in system calls of at most LLMAAS_RECORD_MAX bytes of payloads; a longer one travels alone. A read also takes
 * neighbours together that are at most LLMAAS_STORE_GAP apart: to read the bytes between them costs less than a call.
 * Give the extents in any order: they are sorted by place, 256 at a time. */
#ifndef LLMAAS_STORE_H
#define LLMAAS_STORE_H

#include "llmaas/base.h"

#include <stdbool.h>

#define LLMAAS_RECORD_MAX  (1u << 20)
#define LLMAAS_STORE_BLOCK 4096u
#define LLMAAS_STORE_GAP   (24u << 10)

typedef struct llmaas_io_stats {
    uint64_t bytes;     /* moved by system calls: payloads, their padding to whole blocks, and the gaps in between */
    uint64_t n_calls;   /* system calls that moved them */
    int32_t  sys_errno; /* of the first failed call, else 0 */
} llmaas_io_stats;

/* Buffers start on 4 KiB boundaries and hold whole 4 KiB blocks, as O_DIRECT wants them: room for lengths[i] rounded
 * up. Anything else about a buffer's address is EINVAL. */

/* Read n payloads, several system calls at a time, and llmaas_chunk_verify() each against keys[i] while others are read.
 * statuses[i]: OK, ESTALE, ECORRUPT, or EIO (end of file, or a read error in it or before it in the same system call). The call
 * itself fails only with EINVAL. is_ahead: nobody waits for them yet, so one system call at a time (llmaas/io.h). */
LLMAAS_API llmaas_status llmaas_store_read(
    int fd, uint32_t n, const uint64_t * offsets, const uint64_t * lengths, uint8_t * const * dst,
    const uint8_t (* keys)[32], bool is_ahead, int32_t * statuses, llmaas_io_stats * stats);

/* Write n payloads in whole blocks; what follows a payload in its last block is the caller's. Stops at the first
 * failing call with EIO. No fsync. */
LLMAAS_API llmaas_status llmaas_store_write(
    int fd, uint32_t n, const uint64_t * offsets, const uint64_t * lengths, const uint8_t * const * src,
    llmaas_io_stats * stats);

/* Erase n extents, lengths rounded up to whole blocks: holes where the file system can punch them, zeros where it cannot.
 * Erase within the file: it never grows or shrinks by a hole. fd is not open with O_DIRECT. Stops at the first failing
 * call with EIO. stats->bytes counts what was erased. */
LLMAAS_API llmaas_status llmaas_store_erase(
    int fd, uint32_t n, const uint64_t * offsets, const uint64_t * lengths, llmaas_io_stats * stats);

#endif
