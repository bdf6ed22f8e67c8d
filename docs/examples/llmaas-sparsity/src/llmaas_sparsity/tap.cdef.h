typedef struct sparsity sparsity;
sparsity * sparsity_new(int n_layer, float threshold);
void * sparsity_tap(sparsity * s);
void sparsity_read(const sparsity * s, int i, uint64_t * n_small, uint64_t * n_all);
void sparsity_free(sparsity * s);
