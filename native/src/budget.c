#include "llmaas/budget.h"

#include <stdatomic.h>
#include <stdlib.h>

struct llmaas_budget {
    _Atomic uint64_t used;
    _Atomic uint64_t peak;
    _Atomic uint64_t limit;
};

llmaas_budget * llmaas_budget_new(uint64_t limit) {
    llmaas_budget * budget = malloc(sizeof *budget);
    if (budget) {
        atomic_init(&budget->used, 0);
        atomic_init(&budget->peak, 0);
        atomic_init(&budget->limit, limit);
    }
    return budget;
}

void llmaas_budget_free(llmaas_budget * budget) { free(budget); }

llmaas_status llmaas_budget_reserve(llmaas_budget * budget, uint64_t n) {
    if (!budget) {
        return LLMAAS_EINVAL;
    }
    uint64_t used = atomic_load(&budget->used);
    do {
        const uint64_t limit = atomic_load(&budget->limit);
        if (used > limit || n > limit - used) {
            return LLMAAS_EBUDGET;
        }
    } while (!atomic_compare_exchange_weak(&budget->used, &used, used + n));
    uint64_t peak = atomic_load(&budget->peak);
    while (peak < used + n && !atomic_compare_exchange_weak(&budget->peak, &peak, used + n)) {
    }
    return LLMAAS_OK;
}

llmaas_status llmaas_budget_release(llmaas_budget * budget, uint64_t n) {
    if (!budget) {
        return LLMAAS_EINVAL;
    }
    uint64_t used = atomic_load(&budget->used);
    do {
        if (n > used) {
            return LLMAAS_EINVAL;
        }
    } while (!atomic_compare_exchange_weak(&budget->used, &used, used - n));
    return LLMAAS_OK;
}

uint64_t llmaas_budget_used(const llmaas_budget * budget) { return budget ? atomic_load(&budget->used) : 0; }
uint64_t llmaas_budget_peak(const llmaas_budget * budget) { return budget ? atomic_load(&budget->peak) : 0; }
uint64_t llmaas_budget_limit(const llmaas_budget * budget) { return budget ? atomic_load(&budget->limit) : 0; }

void llmaas_budget_set_limit(llmaas_budget * budget, uint64_t limit) {
    if (budget) {
        atomic_store(&budget->limit, limit);
    }
}
