/* I/O vectors that system calls resume after short transfers. */
#ifndef LLMAAS_IOV_H
#define LLMAAS_IOV_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* Advance the vector by n_bytes, in place. Return the pieces left. */
static inline uint32_t llmaas_iov_skip(struct iovec ** iov, uint32_t n, size_t n_bytes) {
    for (; n > 0 && n_bytes >= (*iov)->iov_len; --n, ++*iov) {
        n_bytes -= (*iov)->iov_len;
    }
    if (n > 0) {
        (*iov)->iov_base = (uint8_t *) (*iov)->iov_base + n_bytes;
        (*iov)->iov_len -= n_bytes;
    }
    return n;
}

#endif
