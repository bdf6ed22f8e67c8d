/* A byte budget shared by threads: reserve before allocating, release after freeing. */
#ifndef LLMAAS_BUDGET_H
#define LLMAAS_BUDGET_H

#include "llmaas/base.h"

typedef struct llmaas_budget llmaas_budget;

LLMAAS_API llmaas_budget * llmaas_budget_new(uint64_t limit); /* NULL: out of memory */
LLMAAS_API void llmaas_budget_free(llmaas_budget * budget);   /* NULL is allowed */

/* EBUDGET, and nothing changes, when used + n would exceed the limit. */
LLMAAS_API llmaas_status llmaas_budget_reserve(llmaas_budget * budget, uint64_t n);
/* EINVAL, and nothing changes, when more is given back than is used. */
LLMAAS_API llmaas_status llmaas_budget_release(llmaas_budget * budget, uint64_t n);

LLMAAS_API uint64_t llmaas_budget_used(const llmaas_budget * budget);
LLMAAS_API uint64_t llmaas_budget_peak(const llmaas_budget * budget);
LLMAAS_API uint64_t llmaas_budget_limit(const llmaas_budget * budget);
/* May be set below what is used: then every reservation fails until enough is released. */
LLMAAS_API void llmaas_budget_set_limit(llmaas_budget * budget, uint64_t limit);

#endif
