/* A piece: a run of bytes of weights in a file, which memory holds as a whole or not at all. */
#ifndef LLMAAS_PIECE_H
#define LLMAAS_PIECE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LLMAAS_PIECE_BYTES (2 << 20) /* at most, unless something cannot be cut */

/* A run of a weight's rows, or of an operand's channels. */
typedef struct llmaas_piece {
    int      fd;
    uint64_t offset; /* of the piece's bytes in the file */
    size_t   n_bytes;
    char *   home; /* where it is when kept: its own address space, backed by memory only then */
    bool     is_kept;
    bool     is_wanted;     /* to be kept, and so read in full */
    bool     is_never_kept; /* its channels are kept instead (channels.h) */
    double   keep_order;    /* pieces with the same use are kept in ascending order of this; negative: no graph has used
                             * the piece yet */
    size_t   n_now, n_lately; /* most bytes that a graph used: in the current interval of 32 graphs, and of late (last
                               * interval included) */
} llmaas_piece;

/* Bytes used of a piece: among the first n_bytes, the first `width` of every `stride`. A smaller width means that a
 * part leaves out columns. */
typedef struct llmaas_strided {
    size_t n_bytes, stride, width;
} llmaas_strided;

#endif
