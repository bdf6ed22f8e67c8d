/* Limits hold under threads, and nothing is lost. */
#include "check.h"

#include <pthread.h>

enum { N_THREADS = 4, N_ROUNDS = 20000 };

static void * worker(void * arg) {
    llmaas_budget * budget = arg;
    for (uint64_t i = 0; i < N_ROUNDS; ++i) {
        const uint64_t n = 1 + i % 37;
        if (llmaas_budget_reserve(budget, n) == LLMAAS_OK) {
            CHECK(llmaas_budget_used(budget) <= 100);
            CHECK(llmaas_budget_release(budget, n) == LLMAAS_OK);
        }
    }
    return NULL;
}

int main(void) {
    llmaas_budget * budget = llmaas_budget_new(100);
    CHECK(budget && llmaas_budget_limit(budget) == 100);
    CHECK(llmaas_budget_reserve(budget, 60) == LLMAAS_OK && llmaas_budget_reserve(budget, 41) == LLMAAS_EBUDGET);
    CHECK(llmaas_budget_reserve(budget, UINT64_MAX) == LLMAAS_EBUDGET && llmaas_budget_used(budget) == 60);
    CHECK(llmaas_budget_reserve(budget, 40) == LLMAAS_OK && llmaas_budget_release(budget, 101) == LLMAAS_EINVAL);
    llmaas_budget_set_limit(budget, 10);
    CHECK(llmaas_budget_reserve(budget, 0) == LLMAAS_EBUDGET && llmaas_budget_used(budget) == 100);
    CHECK(llmaas_budget_release(budget, 100) == LLMAAS_OK && llmaas_budget_peak(budget) == 100);
    CHECK(llmaas_budget_reserve(NULL, 1) == LLMAAS_EINVAL && llmaas_budget_release(NULL, 1) == LLMAAS_EINVAL);
    llmaas_budget_set_limit(budget, 100);
    pthread_t threads[N_THREADS];
    for (int i = 0; i < N_THREADS; ++i) {
        CHECK(pthread_create(&threads[i], NULL, worker, budget) == 0);
    }
    for (int i = 0; i < N_THREADS; ++i) {
        pthread_join(threads[i], NULL);
    }
    CHECK(llmaas_budget_used(budget) == 0 && llmaas_budget_peak(budget) <= 100);
    llmaas_budget_free(budget);
    llmaas_budget_free(NULL);
    return 0;
}
