#include "stream/memory_budget.h"

enum { MIN_GROWTH = 2 << 20 }; /* bytes by which other memory may grow before less is kept */

void llmaas_memory_budget_set(llmaas_memory_budget * budget, uint64_t n_bytes) {
    budget->n_set = budget->n_max = n_bytes;
    budget->n_more = 0;
}

void llmaas_memory_budget_reduce(llmaas_memory_budget * budget, int64_t n_more) {
    budget->n_more += n_more;
    const uint64_t n_taken = budget->n_more > MIN_GROWTH ? (uint64_t) budget->n_more : 0;
    budget->n_max          = budget->n_set > n_taken ? budget->n_set - n_taken : 0;
}

/* -- shares ------------------------------------------------------------------------------------------------------ */

static uint64_t less(uint64_t n, uint64_t n_taken) { return n > n_taken ? n - n_taken : 0; }

/* Return the memory left beside pieces. Pieces come first because every token uses all of them, but only some experts
 * and channels. */
static uint64_t beside_pieces(const llmaas_memory_budget * budget) {
    return less(budget->n_max, llmaas_pieces_bytes(budget->pieces));
}

/* Return the experts' share of that memory. Experts and channels share it by size, but the experts of one product
 * always have room. */
static uint64_t of_experts(const llmaas_memory_budget * budget) {
    if (!budget->experts) {
        return 0;
    }
    const llmaas_expert_stats experts = llmaas_experts_read_stats(budget->experts);
    const uint64_t n_channels = budget->channels ? llmaas_channels_read_stats(budget->channels).n_bytes : 0;
    const double   share      = (double) experts.n_bytes / (double) (experts.n_bytes + n_channels);
    const uint64_t n_bytes    = (uint64_t) (share * (double) beside_pieces(budget));
    return n_bytes > experts.n_least ? n_bytes : experts.n_least;
}

/* Return the memory that is left when everything that tokens use is kept. */
static uint64_t spare(const llmaas_memory_budget * budget) {
    const uint64_t n_experts  = budget->experts ? llmaas_experts_read_stats(budget->experts).n_bytes : 0;
    const uint64_t n_channels = budget->channels ? llmaas_channels_read_stats(budget->channels).n_bytes : 0;
    return less(beside_pieces(budget), n_experts + n_channels);
}

llmaas_piece_room llmaas_memory_budget_of_pieces(const llmaas_memory_budget * budget) {
    return (llmaas_piece_room) {.n_bytes = less(budget->n_max, of_experts(budget)), .n_spare = spare(budget)};
}

void llmaas_memory_budget_apply(const llmaas_memory_budget * budget) {
    const uint64_t          n_experts = of_experts(budget);
    const llmaas_piece_room room      = llmaas_memory_budget_of_pieces(budget);
    if (budget->experts) {
        llmaas_experts_set_memory(budget->experts, n_experts);
    }
    if (budget->channels) {
        llmaas_channels_set_memory(budget->channels, less(beside_pieces(budget), n_experts));
    }
    llmaas_pieces_set_memory(budget->pieces, &room);
}
