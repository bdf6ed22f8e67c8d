/* Slots: memory for the channels of some operands, all of one size, where those stay that are used most often of late. */
#ifndef LLMAAS_SLOTS_H
#define LLMAAS_SLOTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LLMAAS_SLOTS_COUNTS 1024 /* uses are told apart up to here */

/* A channel of an operand, as its slot and others know it. */
typedef struct llmaas_channel {
    int32_t  slot;   /* below 0: none */
    uint32_t n_uses; /* of late */
} llmaas_channel;

typedef struct llmaas_slots llmaas_slots;

/* Of n_bytes each. NULL: memory. */
llmaas_slots * llmaas_slots_new(size_t n_bytes);
void           llmaas_slots_free(llmaas_slots * slots);

/* So many channels more may want a slot; before the first is taken. */
void llmaas_slots_expect(llmaas_slots * slots, size_t n_channels);
/* How many slots may be used; those beyond give their memory back. */
void llmaas_slots_resize(llmaas_slots * slots, size_t n);

size_t llmaas_slots_all(const llmaas_slots * slots);  /* bytes of all channels */
size_t llmaas_slots_kept(const llmaas_slots * slots); /* bytes that hold memory */

/* A turn: channels that are used together, none of which takes another's slot. False: memory. */
bool llmaas_slots_turn(llmaas_slots * slots);
/* The bytes of a channel that has a slot; it is used in this turn. */
char * llmaas_slots_use(llmaas_slots * slots, const llmaas_channel * channel);
/* A slot for a channel that has none: a free one, or that of one that was used less often. NULL: there is none. */
char * llmaas_slots_take(llmaas_slots * slots, llmaas_channel * channel);

/* Forget what is in them: it was not read after all. */
void llmaas_slots_clear(llmaas_slots * slots);

#endif
