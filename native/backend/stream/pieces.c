#include "stream/pieces.h"

#include "base/pages.h"
#include "src/grow.h"

#include <math.h>
#include <stdlib.h>

enum { AGE = 32 }; /* graphs after which what was used in between counts as used of late */

struct llmaas_pieces {
    llmaas_arena *  arena;
    llmaas_piece ** all;
    size_t          n, n_capacity;
    size_t          n_used; /* pieces that some graph has used */
    uint64_t        n_graphs;
    uint64_t        n_bytes, n_spare; /* bytes of the pieces, and of spare ones */
    uint64_t        n_spare_used; /* bytes of spare pieces that graphs used */
    bool            is_stale;
};

llmaas_pieces * llmaas_pieces_new(llmaas_arena * arena) {
    llmaas_pieces * pieces = calloc(1, sizeof *pieces);
    if (pieces) {
        pieces->arena = arena;
    }
    return pieces;
}

void llmaas_pieces_free(llmaas_pieces * pieces) {
    if (!pieces) {
        return;
    }
    for (size_t i = 0; i < pieces->n; i++) {
        free(pieces->all[i]);
    }
    free(pieces->all);
    free(pieces);
}

llmaas_piece_stats llmaas_pieces_read_stats(const llmaas_pieces * pieces) {
    llmaas_piece_stats stats = {
        .n_bytes = pieces->n_bytes, .n_spare = pieces->n_spare, .n_spare_used = pieces->n_spare_used};
    for (size_t i = 0; i < pieces->n; i++) {
        const llmaas_piece * piece = pieces->all[i];
        const bool           has   = piece->is_kept || piece->has_first;
        if (piece->is_spare) {
            stats.n_spare_kept += piece->is_kept ? piece->n_bytes : 0;
            continue;
        }
        stats.n_kept += piece->is_kept ? piece->n_bytes : piece->has_first ? piece->n_first : 0;
        stats.n_first += piece->n_first;
        stats.n_first_kept += has ? piece->n_first : 0;
    }
    return stats;
}

uint64_t llmaas_pieces_bytes(const llmaas_pieces * pieces) { return pieces->n_bytes; }

llmaas_piece * llmaas_pieces_add(llmaas_pieces * pieces, const llmaas_piece * piece) {
    llmaas_piece ** all   = llmaas_grown(pieces->all, pieces->n, &pieces->n_capacity, sizeof *all);
    pieces->all           = all ? all : pieces->all;
    llmaas_piece *  added = all ? malloc(sizeof *added) : NULL;
    if (!added) {
        return NULL;
    }
    *added            = *piece;
    added->keep_order = -1;
    pieces->n_bytes += piece->n_bytes;
    return pieces->all[pieces->n++] = added;
}

void llmaas_pieces_spare(llmaas_pieces * pieces, llmaas_piece * piece) {
    if (!piece->is_spare) {
        pieces->n_bytes -= piece->n_bytes;
        pieces->n_spare += piece->n_bytes;
        pieces->is_stale = piece->is_spare = true;
    }
}

/* -- bytes that are kept first ----------------------------------------------------------------------------------- */

static bool is_whole(const llmaas_piece * piece) { return piece->n_first == piece->n_bytes; }

/* Keep a piece as a whole if the bytes are most of it. */
void llmaas_pieces_keep_first(llmaas_pieces * pieces, llmaas_piece * piece, const llmaas_strided * first) {
    const llmaas_strided all     = {piece->n_bytes, piece->n_bytes, piece->n_bytes};
    const size_t         n_first = llmaas_piece_first_bytes(piece, first);
    const bool           is_most = n_first > piece->n_bytes / 4 * 3;
    if (piece->has_first && !piece->is_kept) {
        llmaas_pages_release(llmaas_pages_in(piece->home, piece->n_bytes));
    }
    piece->first     = is_most ? all : *first;
    piece->n_first   = is_most ? piece->n_bytes : n_first;
    piece->has_first = piece->wants_first = false;
    pieces->is_stale = true;
}

/* -- what graphs use --------------------------------------------------------------------------------------------- */

/* Return how much of a piece graphs used of late: 0 nothing, 1 a part, 2 all of it. */
static int use_of(const llmaas_piece * piece) { return piece->n_lately < piece->n_bytes ? piece->n_lately > 0 : 2; }

void llmaas_pieces_note(llmaas_pieces * pieces, llmaas_piece * piece, const llmaas_strided * used) {
    const size_t n_bytes = used->n_bytes / used->stride * used->width;
    const int    before  = use_of(piece);
    piece->n_now     = n_bytes > piece->n_now ? n_bytes : piece->n_now;
    piece->n_lately  = n_bytes > piece->n_lately ? n_bytes : piece->n_lately;
    pieces->is_stale = pieces->is_stale || use_of(piece) != before;
    pieces->n_spare_used += piece->is_spare ? n_bytes : 0;
}

bool llmaas_pieces_use(
    llmaas_pieces * pieces, llmaas_piece * piece, const llmaas_strided * used, struct ggml_tensor * weight, size_t n_before) {
    if (piece->keep_order < 0) { /* multiples of the golden ratio are evenly spread, however many there are */
        piece->keep_order = fmod((double) ++pieces->n_used * 0.6180339887498949, 1);
        pieces->is_stale  = true;
    }
    llmaas_pieces_note(pieces, piece, used);
    return llmaas_arena_use(pieces->arena, piece, used, weight, n_before);
}

/* At the end of an interval, the bytes that it used are those that count as used of late. */
void llmaas_pieces_age(llmaas_pieces * pieces) {
    if (++pieces->n_graphs % AGE != 0) {
        return;
    }
    for (size_t i = 0; i < pieces->n; i++) {
        llmaas_piece * piece  = pieces->all[i];
        const int      before = use_of(piece);
        piece->n_lately       = piece->n_now;
        piece->n_now          = 0;
        pieces->is_stale      = pieces->is_stale || use_of(piece) != before;
    }
}

/* -- choosing the kept pieces ------------------------------------------------------------------------------------ */

bool llmaas_pieces_are_stale(const llmaas_pieces * pieces) { return pieces->is_stale; }

static double share_first(const llmaas_piece * piece) { return (double) piece->n_first / (double) piece->n_bytes; }

static int by_use_and_order(const void * a, const void * b) {
    const llmaas_piece * x = *(llmaas_piece * const *) a, * y = *(llmaas_piece * const *) b;
    if (use_of(x) != use_of(y)) {
        return use_of(y) - use_of(x);
    }
    if (share_first(x) < share_first(y) || share_first(x) > share_first(y)) {
        return share_first(x) < share_first(y) ? 1 : -1;
    }
    return (x->keep_order > y->keep_order) - (x->keep_order < y->keep_order);
}

/* Add what memory for n_more bytes of a piece adds to n_wanted; return whether there is room for them. Pieces that no
 * graph has used are not wanted. */
static bool has_room(const llmaas_piece * piece, size_t n_more, uint64_t * n_wanted, uint64_t n_room) {
    *n_wanted += piece->keep_order >= 0 ? n_more : 0;
    return piece->keep_order >= 0 && *n_wanted <= n_room;
}

void llmaas_pieces_choose(llmaas_pieces * pieces, const llmaas_piece_room * room) {
    uint64_t n_wanted = 0, n_spare = 0;
    if (pieces->n == 0) {
        return;
    }
    qsort(pieces->all, pieces->n, sizeof *pieces->all, by_use_and_order);
    for (size_t i = 0; i < pieces->n; i++) {
        llmaas_piece * piece = pieces->all[i];
        const bool     has   = !piece->is_spare && has_room(piece, piece->n_first, &n_wanted, room->n_bytes);
        piece->wants_first   = piece->n_first > 0 && has;
    }
    for (size_t i = 0; i < pieces->n; i++) {
        llmaas_piece * piece = pieces->all[i];
        if (piece->is_spare) {
            piece->is_wanted = has_room(piece, piece->n_bytes, &n_spare, room->n_spare);
        } else {
            const bool has   = has_room(piece, piece->n_bytes - piece->n_first, &n_wanted, room->n_bytes);
            piece->is_wanted = is_whole(piece) ? piece->wants_first : has;
        }
    }
}

void llmaas_pieces_set_memory(llmaas_pieces * pieces, const llmaas_piece_room * room) {
    llmaas_pieces_choose(pieces, room);
    for (size_t i = 0; i < pieces->n; i++) {
        llmaas_piece * piece = pieces->all[i];
        if (piece->is_kept && !piece->is_wanted && piece->wants_first) {
            llmaas_piece_keep_first_only(piece);
        } else if ((piece->is_kept && !piece->is_wanted) || (piece->has_first && !piece->wants_first)) {
            llmaas_pages_release(llmaas_pages_in(piece->home, piece->n_bytes));
            piece->has_first = piece->is_kept = false;
        }
    }
    pieces->is_stale = false;
}
