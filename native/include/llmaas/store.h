/* Batched file I/O for chunk payloads. Extents start on 4 KiB boundaries and take whole 4 KiB blocks. Neighbors share
 * system calls of at most LLMAAS_RECORD_MAX bytes of payload; a longer payload gets a call of its own. A read also
 * joins neighbors that are at most LLMAAS_STORE_GAP apart: reading the bytes between them costs less than another call.
 * Extents may be given in any order: they are sorted by offset, 256 at a time. */
#ifndef LLMAAS_STORE_H
#define LLMAAS_STORE_H

#include "llmaas/base.h"

#include <stdbool.h>

#define LLMAAS_RECORD_MAX  (1u << 20)
#define LLMAAS_STORE_BLOCK 4096u
#define LLMAAS_STORE_GAP   (24u << 10)

typedef struct llmaas_io_stats {
    uint64_t bytes;     /* bytes that system calls moved: payloads, padding to whole blocks, and gaps that were read
                         * along */
    uint64_t n_calls;   /* system calls that moved bytes */
    int32_t  sys_errno; /* errno of the first failed call, else 0 */
} llmaas_io_stats;

/* Buffers start on 4 KiB boundaries and hold whole 4 KiB blocks, as O_DIRECT requires: room for lengths[i] rounded up.
 * A misaligned buffer is EINVAL. */

/* Read n payloads with several system calls in flight; verify each against keys[i] (llmaas_chunk_verify()) while others
 * are read. statuses[i]: OK, ESTALE, ECORRUPT, or EIO (end of file, or a read error at or before the payload in its
 * system call). The call itself fails only with EINVAL. is_ahead: nobody waits for the payloads yet, so one system call
 * at a time (llmaas/io.h). */
LLMAAS_API llmaas_status llmaas_store_read(
    int fd, uint32_t n, const uint64_t * offsets, const uint64_t * lengths, uint8_t * const * dst,
    const uint8_t (* keys)[32], bool is_ahead, int32_t * statuses, llmaas_io_stats * stats);

/* Write n payloads in whole blocks; the caller fills the rest of each last block. Stop at the first failing call with
 * EIO. No fsync. */
LLMAAS_API llmaas_status llmaas_store_write(
    int fd, uint32_t n, const uint64_t * offsets, const uint64_t * lengths, const uint8_t * const * src,
    llmaas_io_stats * stats);

/* Erase n extents, lengths rounded up to whole blocks: punch holes where the file system can, else write zeros. The
 * file never grows or shrinks. fd must not be open with O_DIRECT. Stop at the first failing call with EIO. stats->bytes
 * counts the erased bytes. */
LLMAAS_API llmaas_status llmaas_store_erase(
    int fd, uint32_t n, const uint64_t * offsets, const uint64_t * lengths, llmaas_io_stats * stats);

#endif
