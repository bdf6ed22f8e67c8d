/* Slots: which channel or expert gets one, and which has to give way. */
#include "check.h"

#include "stream/slots.h"

#include <string.h>

enum { N = 8, BYTES = 4096 };

static llmaas_cached channels[N];

static llmaas_slots * slots_new(size_t n_slots) {
    llmaas_slots * slots = llmaas_slots_new(BYTES);
    CHECK(slots);
    for (int i = 0; i < N; i++) {
        channels[i] = (llmaas_cached) {.slot = -1};
    }
    llmaas_slots_expect(slots, N);
    llmaas_slots_resize(slots, n_slots);
    return slots;
}

/* Take a turn as a token does: channels with slots first. Bit i of the result: channel i has a slot at the end. */
static unsigned turn(llmaas_slots * slots, unsigned used) {
    CHECK(llmaas_slots_turn(slots));
    for (int i = 0; i < N; i++) {
        channels[i].n_uses += used >> i & 1;
        if (used >> i & 1 && channels[i].slot >= 0) {
            CHECK(*llmaas_slots_use(slots, &channels[i]) == 'a' + i);
        }
    }
    unsigned there = 0;
    for (int i = 0; i < N; i++) {
        char * memory = used >> i & 1 && channels[i].slot < 0 ? llmaas_slots_take(slots, &channels[i]) : NULL;
        if (memory) {
            memset(memory, 'a' + i, BYTES);
        }
    }
    for (int i = 0; i < N; i++) {
        there |= (unsigned) (channels[i].slot >= 0) << i;
    }
    return there;
}

static void test_the_least_used_goes(void) {
    llmaas_slots * slots = slots_new(3);
    CHECK(turn(slots, 0x07) == 0x07); /* free slots first */
    CHECK(turn(slots, 0x0e) == 0x07); /* 3 was used no more often than 0 */
    CHECK(turn(slots, 0x0c) == 0x0e); /* now it was */
    CHECK(turn(slots, 0x10) == 0x0e);
    CHECK(turn(slots, 0x30) == 0x0e);
    CHECK(turn(slots, 0x10) == 0x1c); /* 1 was used twice, 4 three times */
    CHECK(llmaas_slots_kept(slots) == 3 * BYTES && llmaas_slots_all(slots) == N * BYTES);
    llmaas_slots_free(slots);
}

static void test_nobody_goes_who_is_used_now(void) {
    llmaas_slots * slots = slots_new(2);
    CHECK(turn(slots, 0x03) == 0x03);
    channels[2].n_uses = 9;
    CHECK(turn(slots, 0x07) == 0x03);
    CHECK(turn(slots, 0x06) == 0x06); /* 0 is not used in this turn, so it gives way */
    llmaas_slots_free(slots);
}

static void test_fewer_slots_then_more(void) {
    llmaas_slots * slots = slots_new(N);
    CHECK(turn(slots, 0xff) == 0xff);
    llmaas_slots_resize(slots, 2);
    CHECK(llmaas_slots_kept(slots) == 2 * BYTES && channels[1].slot >= 0 && channels[2].slot < 0);
    CHECK(turn(slots, 0x0f) == 0x03);
    llmaas_slots_resize(slots, 100);
    CHECK(turn(slots, 0xff) == 0xff);
    llmaas_slots_clear(slots);
    CHECK(turn(slots, 0) == 0);
    CHECK(turn(slots, 0xff) == 0xff); /* cleared slots are free */
    llmaas_slots_free(slots);
}

static void test_none(void) {
    llmaas_slots * slots = slots_new(0);
    CHECK(turn(slots, 0xff) == 0 && turn(slots, 0xff) == 0 && llmaas_slots_kept(slots) == 0);
    llmaas_slots_free(slots);
    llmaas_slots_free(NULL);
}

/* Return which expert's slot the given one takes over: N if it was free, -1 if it gets none. */
static int replaced(llmaas_slots * slots, int expert, uint64_t turn, uint64_t now) {
    bool had[N];
    for (int i = 0; i < N; i++) {
        had[i] = channels[i].slot >= 0;
    }
    CHECK(!had[expert]);
    if (!llmaas_slots_replace(slots, &channels[expert], turn, now)) {
        return -1;
    }
    CHECK(channels[expert].slot >= 0);
    for (int i = 0; i < N; i++) {
        if (had[i] && channels[i].slot < 0) {
            return i;
        }
    }
    return N;
}

static void test_experts_always_get_slots_unless_all_are_held(void) {
    llmaas_slots * slots = slots_new(2);
    CHECK(llmaas_slots_base(slots));
    CHECK(replaced(slots, 0, 1, 1) == N && replaced(slots, 1, 2, 2) == N && llmaas_slots_count(slots) == 2);
    CHECK(replaced(slots, 2, 3, 3) == 1); /* as often used as 0, but more recently */
    channels[2].n_uses = 1;
    CHECK(replaced(slots, 3, 4, 4) == 0); /* less often used than 2 */
    CHECK(llmaas_slots_hold(slots, &channels[2], 6) && !llmaas_slots_hold(slots, &channels[2], 6));
    CHECK(!llmaas_slots_hold(slots, &channels[2], 5));
    CHECK(replaced(slots, 4, 5, 4) == -1); /* 3 is held at turn 4, and 2 until turn 6 */
    CHECK(replaced(slots, 4, 5, 5) == 3);
    llmaas_slots_clear(slots);
    CHECK(replaced(slots, 5, 5, 5) == N && replaced(slots, 6, 5, 5) == N && replaced(slots, 7, 5, 5) == -1);
    llmaas_slots_free(slots);
}

static void test_experts_that_were_not_read(void) {
    llmaas_slots * slots = slots_new(3);
    char *         base  = llmaas_slots_base(slots);
    CHECK(replaced(slots, 0, 1, 1) == N && replaced(slots, 1, 1, 1) == N);
    llmaas_slots_drop(slots, &channels[0]);
    CHECK(channels[0].slot < 0 && channels[1].slot == 1);
    CHECK(replaced(slots, 2, 2, 2) == N && replaced(slots, 3, 2, 2) == N && replaced(slots, 4, 2, 2) == 1);
    memset(base, 'a', 3 * BYTES);
    llmaas_slots_blank(slots);
    CHECK(channels[2].slot < 0 && channels[3].slot < 0 && channels[4].slot < 0);
    CHECK(base[0] == 0 && base[BYTES - 1] == 0 && base[BYTES] == 'a');
    llmaas_slots_free(slots);
    slots = slots_new(3);
    CHECK(llmaas_slots_base(slots));
    llmaas_slots_blank(slots);
    CHECK(llmaas_slots_kept(slots) == BYTES); /* it holds memory now */
    CHECK(replaced(slots, 0, 1, 1) == N && replaced(slots, 1, 1, 1) == N && replaced(slots, 2, 1, 1) == N);
    llmaas_slots_free(slots);
}

int main(void) {
    test_experts_that_were_not_read();
    test_experts_always_get_slots_unless_all_are_held();
    test_the_least_used_goes();
    test_nobody_goes_who_is_used_now();
    test_fewer_slots_then_more();
    test_none();
    return 0;
}
