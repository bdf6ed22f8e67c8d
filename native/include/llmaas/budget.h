/* A byte budget shared by threads. Reserve before allocating; release after freeing. */
#ifndef LLMAAS_BUDGET_H
#define LLMAAS_BUDGET_H

#include "llmaas/base.h"

typedef struct llmaas_budget llmaas_budget;

LLMAAS_API llmaas_budget * llmaas_budget_new(uint64_t limit); /* NULL if out of memory */
LLMAAS_API void llmaas_budget_free(llmaas_budget * budget);   /* NULL is allowed */

/* Reserve n bytes. EBUDGET, with no change, if used + n would exceed the limit. */
LLMAAS_API llmaas_status llmaas_budget_reserve(llmaas_budget * budget, uint64_t n);
/* Release n bytes. EINVAL, with no change, if n exceeds the bytes in use. */
LLMAAS_API llmaas_status llmaas_budget_release(llmaas_budget * budget, uint64_t n);

LLMAAS_API uint64_t llmaas_budget_used(const llmaas_budget * budget);
LLMAAS_API uint64_t llmaas_budget_peak(const llmaas_budget * budget);
LLMAAS_API uint64_t llmaas_budget_limit(const llmaas_budget * budget);
/* Set the limit. A limit below the bytes in use makes every reservation fail until enough is released. */
LLMAAS_API void llmaas_budget_set_limit(llmaas_budget * budget, uint64_t limit);

#endif
