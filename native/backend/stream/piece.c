#include "stream/piece.h"

#include "base/pages.h"

#include <string.h>

bool llmaas_piece_is_whole(const llmaas_piece * piece, const llmaas_strided * bytes) {
    return bytes->n_bytes == piece->n_bytes && bytes->width == bytes->stride;
}

bool llmaas_strided_within(const llmaas_strided * bytes, const llmaas_strided * all) {
    const bool is_same = all->stride == bytes->stride && all->width >= bytes->width;
    return bytes->n_bytes <= all->n_bytes && (is_same || all->width == all->stride);
}

bool llmaas_piece_has(const llmaas_piece * piece, const llmaas_strided * bytes) {
    return piece->is_kept || (piece->has_first && llmaas_strided_within(bytes, &piece->first));
}

bool llmaas_piece_is_in_place(const llmaas_piece * piece) {
    return piece->is_kept || (piece->has_first && piece->first.width == piece->first.stride);
}

/* Move the first `width` bytes of every stride from `bytes` side by side to `to`, which may be the same. Return their number. */
static size_t gather(char * to, const char * bytes, const llmaas_strided * of) {
    size_t n = 0;
    for (size_t from = 0; from < of->n_bytes; from += of->stride) {
        const size_t n_left = of->n_bytes - from, width = n_left < of->width ? n_left : of->width;
        memmove(to + n, bytes + from, width);
        n += width;
    }
    return n;
}

void llmaas_piece_keep(llmaas_piece * piece, const llmaas_strided * loaded, const char * bytes) {
    if (piece->is_kept) {
        return;
    }
    if (piece->is_wanted && llmaas_piece_is_whole(piece, loaded)) {
        memcpy(piece->home, bytes, piece->n_bytes);
        piece->is_kept = true;
    } else if (piece->wants_first && !piece->has_first && llmaas_strided_within(&piece->first, loaded)) {
        gather(piece->home, bytes, &piece->first);
        piece->has_first = true;
    }
}

void llmaas_piece_keep_first_only(llmaas_piece * piece) {
    const size_t n = gather(piece->home, piece->home, &piece->first);
    llmaas_pages_release(llmaas_pages_in(piece->home + n, piece->n_bytes - n));
    piece->has_first = true;
    piece->is_kept   = false;
}

size_t llmaas_piece_first_bytes(const llmaas_piece * piece, const llmaas_strided * first) {
    const uintptr_t page = llmaas_page_size(), home = (uintptr_t) piece->home;
    const size_t    n_strides = first->n_bytes / first->stride, n_left = first->n_bytes % first->stride;
    const size_t    n = n_strides * first->width + (n_left < first->width ? n_left : first->width);
    return n == 0 ? 0 : (home + n + page - 1) / page * page - home / page * page;
}
