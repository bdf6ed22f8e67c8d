/* Slots: memory for items of one size, channels or experts. The items that were used most often of late stay in slots. */
#ifndef LLMAAS_SLOTS_H
#define LLMAAS_SLOTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LLMAAS_SLOTS_COUNTS 1024 /* counts of uses above this are treated alike */

/* An item's state, shared by its owner and its slot. */
typedef struct llmaas_cached {
    int32_t  slot;   /* negative: none */
    uint32_t n_uses; /* uses of late */
} llmaas_cached;

typedef struct llmaas_slots llmaas_slots;

/* Create slots of n_bytes each. NULL if out of memory. */
llmaas_slots * llmaas_slots_new(size_t n_bytes);
void           llmaas_slots_free(llmaas_slots * slots);

/* Announce n more items that may want slots; call before the first slot is taken. */
void llmaas_slots_expect(llmaas_slots * slots, size_t n);
/* Set how many slots may be used; slots beyond n give their memory back. */
void llmaas_slots_resize(llmaas_slots * slots, size_t n);

size_t llmaas_slots_all(const llmaas_slots * slots);   /* bytes of all items */
size_t llmaas_slots_kept(const llmaas_slots * slots);  /* bytes that hold memory */
size_t llmaas_slots_count(const llmaas_slots * slots); /* slots that may be used */

/* Forget the contents of all slots: they were not read after all. */
void llmaas_slots_clear(llmaas_slots * slots);
/* Take its slot from an item. */
void llmaas_slots_drop(llmaas_slots * slots, llmaas_cached * item);

/* -- items that get a slot only if they are used often: channels --------------------------------------------------- */

/* Begin a turn: its channels are used together, and none takes another's slot. False if out of memory. */
bool llmaas_slots_turn(llmaas_slots * slots);
/* Return the bytes of a channel that has a slot, and mark it as used in this turn. */
char * llmaas_slots_use(llmaas_slots * slots, const llmaas_cached * channel);
/* Find a slot for a channel that has none: a free slot, or that of a channel that was used less often. NULL if there is
 * none. */
char * llmaas_slots_take(llmaas_slots * slots, llmaas_cached * channel);

/* -- items that must have slots when they are used: experts -------------------------------------------------------- */

/* Return where the slots are, one after another. Address space is reserved by the first call. NULL if out of memory. */
char * llmaas_slots_base(llmaas_slots * slots);
/* Forget the contents of all slots, and fill the first with zeros. */
void llmaas_slots_blank(llmaas_slots * slots);
/* Hold the slot that an expert has until `turn`. Return false if it was held as long already. */
bool llmaas_slots_hold(llmaas_slots * slots, const llmaas_cached * expert, uint64_t turn);
/* Give a slot to an expert that has none, and hold it until `turn`. The slot is free, or not held from turn `now` on.
 * False if there is none. */
bool llmaas_slots_replace(llmaas_slots * slots, llmaas_cached * expert, uint64_t turn, uint64_t now);

#endif
