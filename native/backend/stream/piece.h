/* A piece: a run of bytes of weights in a file, which memory holds as a whole or not at all. */
#ifndef LLMAAS_PIECE_H
#define LLMAAS_PIECE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LLMAAS_PIECE_BYTES (2 << 20) /* at most, unless something cannot be cut */

/* Bytes of a piece: among the first n_bytes, the first `width` of every `stride`. A smaller width means that a part
 * leaves out columns. */
typedef struct llmaas_strided {
    size_t n_bytes, stride, width;
} llmaas_strided;

/* A run of a weight's rows, or of an operand's channels. */
typedef struct llmaas_piece {
    int      fd;
    uint64_t offset; /* of the piece's bytes in the file */
    size_t   n_bytes;
    char *   home; /* where it is when kept: its own address space, backed by memory only then */
    bool     is_kept;
    bool     is_wanted; /* to be kept, and so read in full */
    bool     is_spare;  /* used by prompts only, as tokens use its channels (channels.h); kept in memory that is left */
    llmaas_strided first;   /* bytes that are kept before all other bytes, side by side; n_bytes 0: none */
    size_t   n_first;       /* bytes of memory that `first` takes: whole pages */
    bool     has_first;     /* `first` is kept, though the piece is not */
    bool     wants_first;   /* `first` is to be kept */
    double   keep_order;    /* pieces with the same use are kept in ascending order of this; negative: no graph has used
                             * the piece yet */
    size_t   n_now, n_lately; /* most bytes that a graph used: in the current interval of 32 graphs, and of late (last
                               * interval included) */
} llmaas_piece;

/* Return whether these bytes of a piece are all of it; or are among `all`; or are in memory. */
bool llmaas_piece_is_whole(const llmaas_piece * piece, const llmaas_strided * bytes);
bool llmaas_strided_within(const llmaas_strided * bytes, const llmaas_strided * all);
bool llmaas_piece_has(const llmaas_piece * piece, const llmaas_strided * bytes);

/* Return whether what memory holds of a piece lies as in the piece: not gathered. */
bool llmaas_piece_is_in_place(const llmaas_piece * piece);

/* Copy what is wanted of a piece to its home, if `loaded` has it; its `bytes` lie as in the piece. */
void llmaas_piece_keep(llmaas_piece * piece, const llmaas_strided * loaded, const char * bytes);
/* Give back all memory of a piece that is kept, but for the bytes that are kept first. */
void llmaas_piece_keep_first_only(llmaas_piece * piece);
/* Return the bytes of whole pages that these bytes would take at the piece's home, if they were kept first. */
size_t llmaas_piece_first_bytes(const llmaas_piece * piece, const llmaas_strided * first);

#endif
