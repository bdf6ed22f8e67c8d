/* Slots: memory for channels of one size, from one or more operands. The channels that were used most often of late
 * stay in slots. */
#ifndef LLMAAS_SLOTS_H
#define LLMAAS_SLOTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LLMAAS_SLOTS_COUNTS 1024 /* counts of uses above this are treated alike */

/* A channel's state, shared by its operand and its slot. */
typedef struct llmaas_channel {
    int32_t  slot;   /* negative: none */
    uint32_t n_uses; /* uses of late */
} llmaas_channel;

typedef struct llmaas_slots llmaas_slots;

/* Create slots of n_bytes each. NULL if out of memory. */
llmaas_slots * llmaas_slots_new(size_t n_bytes);
void           llmaas_slots_free(llmaas_slots * slots);

/* Announce n_channels more channels that may want slots; call before the first slot is taken. */
void llmaas_slots_expect(llmaas_slots * slots, size_t n_channels);
/* Set how many slots may be used; slots beyond n give their memory back. */
void llmaas_slots_resize(llmaas_slots * slots, size_t n);

size_t llmaas_slots_all(const llmaas_slots * slots);  /* bytes of all channels */
size_t llmaas_slots_kept(const llmaas_slots * slots); /* bytes that hold memory */

/* Begin a turn: its channels are used together, and none takes another's slot. False if out of memory. */
bool llmaas_slots_turn(llmaas_slots * slots);
/* Return the bytes of a channel that has a slot, and mark it as used in this turn. */
char * llmaas_slots_use(llmaas_slots * slots, const llmaas_channel * channel);
/* Find a slot for a channel that has none: a free slot, or that of a channel that was used less often. NULL if there is
 * none. */
char * llmaas_slots_take(llmaas_slots * slots, llmaas_channel * channel);

/* Forget the contents of all slots: they were not read after all. */
void llmaas_slots_clear(llmaas_slots * slots);

#endif
