#include "base/pages.h"

#include <sys/mman.h>
#include <unistd.h>

uintptr_t llmaas_page_size(void) { return (uintptr_t) sysconf(_SC_PAGESIZE); }

llmaas_pages llmaas_pages_in(const void * base, size_t n_bytes) {
    const uintptr_t    page = llmaas_page_size(), begin = (uintptr_t) base;
    const llmaas_pages pages = {(begin + page - 1) / page * page, (begin + n_bytes) / page * page};
    return pages.start < pages.end ? pages : (llmaas_pages) {0, 0};
}

bool llmaas_pages_resident(llmaas_pages pages, uint64_t * n_bytes) {
    enum { N_AT_ONCE = 4096 };
    unsigned char   is_resident[N_AT_ONCE];
    const uintptr_t page = llmaas_page_size();
    *n_bytes = 0;
    for (uintptr_t at = pages.start; at < pages.end; at += N_AT_ONCE * page) {
        const uintptr_t n_left = (pages.end - at) / page;
        const uintptr_t n      = n_left < N_AT_ONCE ? n_left : N_AT_ONCE;
        if (mincore((void *) at, n * page, is_resident)) {
            return false;
        }
        for (uintptr_t i = 0; i < n; ++i) {
            *n_bytes += (is_resident[i] & 1) * page;
        }
    }
    return true;
}

bool llmaas_pages_states(llmaas_pages pages, unsigned char * are_there) {
    if (pages.start < pages.end && mincore((void *) pages.start, pages.end - pages.start, are_there)) {
        return false;
    }
    for (uintptr_t i = 0; i < (pages.end - pages.start) / llmaas_page_size(); ++i) {
        are_there[i] &= 1;
    }
    return true;
}

bool llmaas_pages_release(llmaas_pages pages) {
    return pages.start == pages.end || madvise((void *) pages.start, pages.end - pages.start, MADV_DONTNEED) == 0;
}

void * llmaas_pages_reserve(size_t n_bytes) {
    void * memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}
