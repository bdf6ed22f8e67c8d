/* The pieces of weights in files: which of them are kept.
 *
 * Kept pieces are spread evenly over the order in which graphs use them: then neither reading nor computing waits for
 * the other at a long stretch of pieces of one kind. Pieces that recent graphs used in full are kept first, then those
 * used in part: what a level leaves out makes way for what it needs. Before all of these come the bytes that are to be
 * kept first (llmaas_pieces_keep_first): they may be a part of a piece. The rest of such a piece comes next, as it costs
 * less memory than another piece, and saves as much reading.
 *
 * Spare pieces are those that only prompts use, because tokens use their channels (channels.h). They are kept in memory
 * that is left when everything else is kept. */
#ifndef LLMAAS_PIECES_H
#define LLMAAS_PIECES_H

#include "stream/arena.h"

typedef struct llmaas_pieces llmaas_pieces;

typedef struct llmaas_piece_stats {
    uint64_t n_bytes; /* bytes of all pieces but spare ones */
    uint64_t n_kept;  /* bytes of those that are kept */
    uint64_t n_spare, n_spare_kept; /* the same of spare pieces */
    uint64_t n_spare_used; /* bytes of spare pieces that graphs used so far */
    uint64_t n_first; /* bytes of memory for what is to be kept first */
    uint64_t n_first_kept; /* bytes of n_first that memory holds */
} llmaas_piece_stats;

/* Create a set of pieces that are read into `arena`, which must outlive it. NULL if out of memory. */
llmaas_pieces *    llmaas_pieces_new(llmaas_arena * arena);
void               llmaas_pieces_free(llmaas_pieces * pieces);
llmaas_piece_stats llmaas_pieces_read_stats(const llmaas_pieces * pieces);
uint64_t           llmaas_pieces_bytes(const llmaas_pieces * pieces); /* n_bytes of the statistics */

/* Most bytes of pieces that are kept. */
typedef struct llmaas_piece_room {
    uint64_t n_bytes, n_spare; /* of all but spare pieces, and of these */
} llmaas_piece_room;

/* Add a piece, which lives as long as the set. NULL if out of memory. */
llmaas_piece * llmaas_pieces_add(llmaas_pieces * pieces, const llmaas_piece * piece);
/* Make a piece a spare one, from the next graph on. */
void llmaas_pieces_spare(llmaas_pieces * pieces, llmaas_piece * piece);

/* Keep these bytes of a piece before all others, from the next graph on; n_bytes 0: none of them. */
void llmaas_pieces_keep_first(llmaas_pieces * pieces, llmaas_piece * piece, const llmaas_strided * first);

/* Count a graph: what was used long ago matters less and less. */
void llmaas_pieces_age(llmaas_pieces * pieces);
/* Note that the graph uses so much of `piece`, which is kept. */
void llmaas_pieces_note(llmaas_pieces * pieces, llmaas_piece * piece, const llmaas_strided * used);
/* Note that the graph next uses so much of `piece`, which is not kept (arena.h). */
bool llmaas_pieces_use(
    llmaas_pieces * pieces, llmaas_piece * piece, const llmaas_strided * used, struct ggml_tensor * weight, size_t n_before);

/* Return whether recent graphs used other pieces than before, so that the choice must be repeated. */
bool llmaas_pieces_are_stale(const llmaas_pieces * pieces);
/* Choose the pieces to keep, while a graph is being computed. */
void llmaas_pieces_choose(llmaas_pieces * pieces, const llmaas_piece_room * room);
/* Do the same between graphs, and give back the memory of all other pieces. */
void llmaas_pieces_set_memory(llmaas_pieces * pieces, const llmaas_piece_room * room);

#endif
