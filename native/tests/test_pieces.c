/* Pieces: what is kept first, where it lies, and how much memory it takes. */
#include "check.h"

#include "base/pages.h"
#include "stream/pieces.h"

#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, STRIDE = 2 * PAGE, WIDTH = 100, N_STRIDES = 8, N = N_STRIDES * STRIDE };

static const llmaas_reading defaults = {.n_gap = -1};
static char                 file[N];

static llmaas_piece * add(llmaas_pieces * pieces, char * home) {
    llmaas_piece * piece = llmaas_pieces_add(pieces, &(llmaas_piece) {.fd = -1, .n_bytes = N, .home = home});
    CHECK(piece);
    piece->keep_order = 0; /* as if a graph had used it */
    return piece;
}

static bool is_gathered(const llmaas_piece * piece) {
    bool ok = true;
    for (int i = 0; i < N_STRIDES; i++) {
        ok = ok && memcmp(piece->home + i * WIDTH, file + i * STRIDE, WIDTH) == 0;
    }
    return ok;
}

static void set_memory(llmaas_pieces * pieces, uint64_t n_bytes, uint64_t n_spare) {
    llmaas_pieces_set_memory(pieces, &(llmaas_piece_room) {.n_bytes = n_bytes, .n_spare = n_spare});
}

/* Columns: the first bytes of every stride. */
static void test_columns(llmaas_pieces * pieces, llmaas_piece * piece, llmaas_piece * other) {
    const llmaas_strided first = {N, STRIDE, WIDTH}, narrower = {N / 2, STRIDE, WIDTH / 2}, all = {N, N, N};
    llmaas_pieces_keep_first(pieces, piece, &first);
    CHECK(piece->n_first == PAGE);
    set_memory(pieces, PAGE, 0); /* room for nothing else */
    CHECK(piece->wants_first && !piece->is_wanted && !other->is_wanted);
    CHECK(!llmaas_piece_has(piece, &first));
    llmaas_piece_keep(piece, &narrower, file); /* too little was loaded */
    CHECK(!piece->has_first);
    llmaas_piece_keep(piece, &all, file);
    CHECK(piece->has_first && is_gathered(piece) && !llmaas_piece_is_in_place(piece));
    CHECK(llmaas_piece_has(piece, &first) && llmaas_piece_has(piece, &narrower) && !llmaas_piece_has(piece, &all));
    CHECK(llmaas_pieces_read_stats(pieces).n_kept == PAGE);

    set_memory(pieces, N, 0); /* the rest of this piece comes before the other piece */
    CHECK(piece->is_wanted && !other->is_wanted);
    llmaas_piece_keep(piece, &all, file);
    CHECK(piece->is_kept && llmaas_piece_is_in_place(piece) && memcmp(piece->home, file, N) == 0);
    CHECK(llmaas_pieces_read_stats(pieces).n_kept == N);

    set_memory(pieces, N - 1, 0);
    CHECK(!piece->is_kept && piece->has_first && is_gathered(piece));
    uint64_t n_resident = 0;
    CHECK(llmaas_pages_resident(llmaas_pages_in(piece->home, N), &n_resident) && n_resident == PAGE);
    set_memory(pieces, PAGE - 1, 0);
    CHECK(!piece->has_first && llmaas_pieces_read_stats(pieces).n_kept == 0);
}

/* Rows: the first bytes; most of a piece counts as all of it. */
static void test_rows(llmaas_pieces * pieces, llmaas_piece * piece) {
    const llmaas_strided none = {0, STRIDE, STRIDE}, half = {N / 2, STRIDE, STRIDE}, most = {N - STRIDE, STRIDE, STRIDE};
    llmaas_pieces_keep_first(pieces, piece, &half);
    CHECK(piece->n_first == N / 2);
    set_memory(pieces, N / 2, 0);
    llmaas_piece_keep(piece, &half, file);
    CHECK(piece->has_first && llmaas_piece_is_in_place(piece) && memcmp(piece->home, file, N / 2) == 0);
    llmaas_pieces_keep_first(pieces, piece, &most);
    CHECK(piece->n_first == N && !piece->has_first);
    CHECK(llmaas_pieces_read_stats(pieces).n_first == N);
    llmaas_pieces_keep_first(pieces, piece, &none);
    CHECK(piece->n_first == 0 && llmaas_pieces_read_stats(pieces).n_first == 0);
}

/* Spare pieces have memory of their own, and count apart from the others. */
static void test_spare(llmaas_pieces * pieces, llmaas_piece * piece, llmaas_piece * other) {
    const llmaas_strided all = {N, N, N}, half = {N / 2, STRIDE, STRIDE};
    llmaas_pieces_spare(pieces, piece);
    llmaas_pieces_spare(pieces, piece); /* as for a weight whose columns are added again */
    set_memory(pieces, 2 * N, N - 1);
    CHECK(!piece->is_wanted && other->is_wanted);
    set_memory(pieces, N - 1, N);
    CHECK(piece->is_wanted && !other->is_wanted);
    llmaas_piece_keep(piece, &all, file);
    llmaas_piece_stats stats = llmaas_pieces_read_stats(pieces);
    CHECK(stats.n_bytes == N && stats.n_kept == 0 && stats.n_spare == N && stats.n_spare_kept == N);
    for (int i = 0; i < 3; i++) { /* the last graph is that of a narrow level */
        llmaas_pieces_age(pieces);
        llmaas_pieces_note(pieces, i == 1 ? other : piece, i == 2 ? &half : &all);
    }
    CHECK(llmaas_pieces_read_stats(pieces).n_spare_used == N + N / 2);
    set_memory(pieces, 2 * N, 0);
    CHECK(!piece->is_kept && llmaas_pieces_read_stats(pieces).n_spare_kept == 0);
}

int main(void) {
    for (int i = 0; i < N; i++) {
        file[i] = (char) (i * 7 % 251 + 1);
    }
    llmaas_arena *  arena  = llmaas_arena_new(&defaults);
    llmaas_pieces * pieces = arena ? llmaas_pieces_new(arena) : NULL;
    char *          home   = llmaas_pages_reserve(2 * N);
    CHECK(pieces && home);
    llmaas_piece * piece = add(pieces, home), *other = add(pieces, home + N);
    test_columns(pieces, piece, other);
    test_rows(pieces, piece);
    test_spare(pieces, piece, other);
    munmap(home, 2 * N);
    llmaas_pieces_free(pieces);
    llmaas_arena_free(arena);
    return 0;
}
