/* The memory budget: what pieces, experts and channels get of it. */
#include "check.h"

#include "stream/memory_budget.h"

enum { MIB = 1 << 20, N_EXPERTS = 8 };

static const llmaas_reading defaults = {.n_gap = -1};

static void add_pieces(llmaas_pieces * pieces, size_t n_bytes) {
    CHECK(llmaas_pieces_add(pieces, &(llmaas_piece) {.fd = -1, .n_bytes = n_bytes}));
}

static void test_growth_of_other_memory(llmaas_memory_budget * budget) {
    llmaas_memory_budget_set(budget, 10 * MIB);
    CHECK(llmaas_memory_budget_of_pieces(budget).n_bytes == 10 * MIB);
    llmaas_memory_budget_reduce(budget, MIB);
    CHECK(llmaas_memory_budget_of_pieces(budget).n_bytes == 10 * MIB); /* too little to drop pieces for */
    llmaas_memory_budget_reduce(budget, 3 * MIB);
    CHECK(llmaas_memory_budget_of_pieces(budget).n_bytes == 6 * MIB);
    llmaas_memory_budget_reduce(budget, 20 * MIB);
    CHECK(llmaas_memory_budget_of_pieces(budget).n_bytes == 0);
    llmaas_memory_budget_reduce(budget, -22 * MIB);
    CHECK(llmaas_memory_budget_of_pieces(budget).n_bytes == 10 * MIB);
}

/* Experts get what pieces leave, but always enough for one product. */
static void test_pieces_and_experts(llmaas_memory_budget * budget) {
    for (int i = 0; i < 2; i++) {
        CHECK(llmaas_experts_add(budget->experts, -1, 0, MIB, N_EXPERTS));
    }
    add_pieces(budget->pieces, 4 * MIB);
    llmaas_memory_budget_set(budget, 14 * MIB);
    CHECK(llmaas_memory_budget_of_pieces(budget).n_bytes == 4 * MIB);
    llmaas_memory_budget_set(budget, 9 * MIB);
    CHECK(llmaas_memory_budget_of_pieces(budget).n_bytes == MIB);
    llmaas_memory_budget_set(budget, MIB);
    CHECK(llmaas_memory_budget_of_pieces(budget).n_bytes == 0);
}

/* Spare pieces get what is left when all pieces and experts are kept. */
static void test_spare(llmaas_memory_budget * budget) {
    const uint64_t n_all = 4 * MIB + (uint64_t) 2 * N_EXPERTS * MIB;
    llmaas_memory_budget_set(budget, n_all + MIB);
    CHECK(llmaas_memory_budget_of_pieces(budget).n_spare == MIB);
    llmaas_memory_budget_set(budget, n_all);
    CHECK(llmaas_memory_budget_of_pieces(budget).n_spare == 0);
    llmaas_memory_budget_set(budget, MIB);
    CHECK(llmaas_memory_budget_of_pieces(budget).n_spare == 0);
}

int main(void) {
    llmaas_arena *       arena  = llmaas_arena_new(&defaults);
    llmaas_memory_budget budget = {.pieces = arena ? llmaas_pieces_new(arena) : NULL};
    CHECK(budget.pieces);
    test_growth_of_other_memory(&budget);
    budget.experts = llmaas_experts_new(&defaults);
    CHECK(budget.experts);
    test_pieces_and_experts(&budget);
    test_spare(&budget);
    llmaas_experts_free(budget.experts);
    llmaas_pieces_free(budget.pieces);
    llmaas_arena_free(arena);
    return 0;
}
