#include "stream/slots.h"

#include "base/pages.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    N_COUNTS   = LLMAAS_SLOTS_COUNTS + 1,
    HUGE_BYTES = 64 << 20, /* in smaller areas, half of an unused huge page is too much */
};

struct slot {
    llmaas_cached * owner; /* NULL: free */
    uint64_t        turn;  /* when it was last used, or will be next */
    uint32_t        n_uses; /* use count of its owner when slots were last sorted */
};

struct llmaas_slots {
    size_t        n_bytes, n_all;
    size_t        n_slots, n_touched; /* slots that may be used, and that were; at most n_all */
    char *        base;               /* NULL until the first turn */
    struct slot * slots;
    uint32_t *    order; /* by uses, the least used first */
    size_t        n_order, next;
    uint64_t      turn, ordered; /* the current turn, and the turn of the last sort */
};

llmaas_slots * llmaas_slots_new(size_t n_bytes) {
    llmaas_slots * slots = calloc(1, sizeof *slots);
    if (slots) {
        slots->n_bytes = n_bytes;
    }
    return slots;
}

void llmaas_slots_free(llmaas_slots * slots) {
    if (!slots) {
        return;
    }
    if (slots->base) {
        munmap(slots->base, slots->n_all * slots->n_bytes);
    }
    free(slots->slots);
    free(slots->order);
    free(slots);
}

void llmaas_slots_expect(llmaas_slots * slots, size_t n) { slots->n_all += n; }

size_t llmaas_slots_all(const llmaas_slots * slots) { return slots->n_all * slots->n_bytes; }
size_t llmaas_slots_kept(const llmaas_slots * slots) { return slots->n_touched * slots->n_bytes; }
size_t llmaas_slots_count(const llmaas_slots * slots) { return slots->n_slots; }

static void disown(struct slot * slot) {
    if (slot->owner) {
        slot->owner->slot = -1;
        slot->owner       = NULL;
    }
}

void llmaas_slots_resize(llmaas_slots * slots, size_t n) {
    n = n < slots->n_all ? n : slots->n_all;
    for (size_t i = n; i < slots->n_touched; i++) {
        disown(&slots->slots[i]);
    }
    if (n < slots->n_touched) {
        llmaas_pages_release(llmaas_pages_in(slots->base + n * slots->n_bytes, (slots->n_touched - n) * slots->n_bytes));
        slots->n_touched = n;
        slots->n_order = slots->next = 0;
    }
    slots->n_slots = n;
}

void llmaas_slots_clear(llmaas_slots * slots) {
    for (size_t i = 0; i < slots->n_touched; i++) {
        disown(&slots->slots[i]);
    }
    slots->n_order = slots->next = 0;
}

void llmaas_slots_drop(llmaas_slots * slots, llmaas_cached * item) { disown(&slots->slots[item->slot]); }

/* Reserve address space; on failure, the next call tries again. */
static bool make(llmaas_slots * slots) {
    slots->slots = slots->slots ? slots->slots : calloc(slots->n_all, sizeof *slots->slots);
    slots->order = slots->order ? slots->order : calloc(slots->n_all, sizeof *slots->order);
    slots->base  = slots->slots && slots->order ? llmaas_pages_reserve(llmaas_slots_all(slots)) : NULL;
    return slots->base != NULL;
}

static uint32_t uses_of(const struct slot * slot) { return slot->owner ? slot->owner->n_uses : 0; }

static void assign(llmaas_slots * slots, struct slot * slot, llmaas_cached * item) {
    disown(slot);
    slot->owner = item;
    item->slot  = (int32_t) (slot - slots->slots);
}

/* -- channels ---------------------------------------------------------------------------------------------------- */

/* Channels are short, so that large areas of them profit from huge pages. */
static bool make_huge(llmaas_slots * slots) {
    const bool ok = make(slots);
#ifdef MADV_HUGEPAGE
    if (ok && llmaas_slots_all(slots) >= HUGE_BYTES) {
        madvise(slots->base, llmaas_slots_all(slots), MADV_HUGEPAGE);
    }
#endif
    return ok;
}

bool llmaas_slots_turn(llmaas_slots * slots) {
    slots->turn++;
    return slots->base || make_huge(slots);
}

/* Sort the slots by uses, in linear time. */
static void put_in_order(llmaas_slots * slots) {
    size_t starts[N_COUNTS + 1] = {0};
    for (size_t i = 0; i < slots->n_touched; i++) {
        struct slot * slot = &slots->slots[i];
        slot->n_uses       = uses_of(slot);
        starts[(slot->n_uses < N_COUNTS ? slot->n_uses : N_COUNTS - 1) + 1]++;
    }
    for (size_t i = 1; i < N_COUNTS; i++) {
        starts[i] += starts[i - 1];
    }
    for (size_t i = 0; i < slots->n_touched; i++) {
        const uint32_t n_uses = slots->slots[i].n_uses;
        slots->order[starts[n_uses < N_COUNTS ? n_uses : N_COUNTS - 1]++] = (uint32_t) i;
    }
    slots->n_order = slots->n_touched;
    slots->next    = 0;
    slots->ordered = slots->turn;
}

/* Find the slot whose channel was used least often, and not in this turn. Slots used since the last sort are skipped,
 * as their order is outdated. NULL if there is none. */
static struct slot * least_used(llmaas_slots * slots) {
    for (;;) {
        for (; slots->next < slots->n_order; slots->next++) {
            struct slot * slot = &slots->slots[slots->order[slots->next]];
            if (slot->turn != slots->turn && uses_of(slot) <= slot->n_uses) {
                return slot;
            }
        }
        if (slots->ordered == slots->turn) {
            return NULL;
        }
        put_in_order(slots);
    }
}

char * llmaas_slots_use(llmaas_slots * slots, const llmaas_cached * channel) {
    slots->slots[channel->slot].turn = slots->turn;
    return slots->base + (size_t) channel->slot * slots->n_bytes;
}

char * llmaas_slots_take(llmaas_slots * slots, llmaas_cached * channel) {
    struct slot * slot = NULL;
    if (slots->n_touched < slots->n_slots) {
        slot = &slots->slots[slots->n_touched++];
    } else {
        slot = least_used(slots);
        if (!slot || uses_of(slot) >= channel->n_uses) {
            return NULL;
        }
    }
    assign(slots, slot, channel);
    return llmaas_slots_use(slots, channel);
}

/* -- experts ----------------------------------------------------------------------------------------------------- */

char * llmaas_slots_base(llmaas_slots * slots) { return slots->base || make(slots) ? slots->base : NULL; }

void llmaas_slots_blank(llmaas_slots * slots) {
    llmaas_slots_clear(slots);
    memset(slots->base, 0, slots->n_bytes);
    slots->n_touched = slots->n_touched > 0 ? slots->n_touched : 1;
}

bool llmaas_slots_hold(llmaas_slots * slots, const llmaas_cached * expert, uint64_t turn) {
    struct slot * slot   = &slots->slots[expert->slot];
    const bool    longer = slot->turn < turn;
    slot->turn           = longer ? turn : slot->turn;
    return longer;
}

/* Find a slot to reuse, among those not needed from `turn` on: the one whose expert was used least often of late.
 * Among equal ones, take the most recently used: if there are fewer slots than a token has uses, the older ones then stay
 * until they are used again. NULL if all slots are needed. */
static struct slot * least_needed(llmaas_slots * slots, uint64_t turn) {
    struct slot * found = NULL;
    for (size_t i = 0; i < slots->n_slots; i++) {
        struct slot * slot = &slots->slots[i];
        if (!slot->owner) {
            return slot;
        }
        if (slot->turn < turn && (!found || uses_of(slot) < uses_of(found) ||
                                  (uses_of(slot) == uses_of(found) && slot->turn > found->turn))) {
            found = slot;
        }
    }
    return found;
}

bool llmaas_slots_replace(llmaas_slots * slots, llmaas_cached * expert, uint64_t turn, uint64_t now) {
    const bool    is_new = slots->n_touched < slots->n_slots;
    struct slot * slot   = is_new ? &slots->slots[slots->n_touched++] : least_needed(slots, now);
    if (slot) {
        assign(slots, slot, expert);
        slot->turn = turn;
    }
    return slot != NULL;
}
