typedef struct llmaas_budget llmaas_budget;

llmaas_budget * llmaas_budget_new(uint64_t limit);
void llmaas_budget_free(llmaas_budget * budget);
llmaas_status llmaas_budget_reserve(llmaas_budget * budget, uint64_t n);
llmaas_status llmaas_budget_release(llmaas_budget * budget, uint64_t n);
uint64_t llmaas_budget_used(const llmaas_budget * budget);
uint64_t llmaas_budget_peak(const llmaas_budget * budget);
uint64_t llmaas_budget_limit(const llmaas_budget * budget);
void llmaas_budget_set_limit(llmaas_budget * budget, uint64_t limit);
