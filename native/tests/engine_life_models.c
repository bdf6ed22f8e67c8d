/* Models: claims, loading and unloading. */
#include "engine_life.h"

#include "llmaas/low_rank.h"

static const int claim_kinds[] = {
    NOTHING, PART, TILES, TILES | PART, FROM_FILE, FROM_FILE | PART, FROM_FILE | CHANNELS};
enum { N_CLAIMS = sizeof claim_kinds / sizeof *claim_kinds };

/* Names that stay valid while a model is being loaded, and a terminator. */
static char                                    patterns[MAX_CLAIMED][80];
static struct llama_model_tensor_buft_override overrides[MAX_CLAIMED + 1];

static bool is_matrix(const char * name) {
    const bool is_wanted = strstr(name, ".ffn_") || strstr(name, ".attn_output.") || strstr(name, ".attn_q.");
    return is_wanted && !strstr(name, "norm") && !strstr(name, "gate_inp");
}

/* Return whether the weight is looked up: the embeddings, which are the output matrix, too. */
static bool is_looked_up(const char * name) { return strcmp(name, "token_embd.weight") == 0; }

/* Claim biases, but none at level 0, where results are compared. */
static void claim_biases(model * m, const llmaas_tensor_info * info) {
    const uint32_t n      = (uint32_t) info->ne[1];
    float *        biases = calloc(3 * n, sizeof *biases);
    CHECK(biases);
    for (uint32_t i = n; i < 3 * n; ++i) {
        biases[i] = (float) rnd_below(100) / 1000.0f;
    }
    CHECK(llmaas_weights_claim_biases(m->weights, info->name, biases, 0, n) == LLMAAS_EINVAL);
    CHECK(llmaas_weights_claim_biases(m->weights, info->name, biases, 3, n) == LLMAAS_OK);
    CHECK(llmaas_weights_claim_biases(m->weights, info->name, biases, 3, n) == LLMAAS_EINVAL);
    free(biases);
}

/* Claim adapters, but none at level 0, where results are compared. */
static void claim_adapters(model * m, const llmaas_tensor_info * info) {
    const uint32_t rank = 1 + rnd_below(5), n_columns = 64, n_rows = 64;
    uint8_t *      a = exact(llmaas_low_rank_bytes(rank, n_columns)), * b = exact(llmaas_low_rank_bytes(rank, n_rows));
    memset(a, 1, llmaas_low_rank_bytes(rank, n_columns)); /* scales are subnormal */
    memset(b, 1, llmaas_low_rank_bytes(rank, n_rows));
    const llmaas_adapter adapters[] = {{0}, {rank, n_columns, n_rows, a, b}};
    CHECK(llmaas_weights_claim_adapters(m->weights, info->name, adapters, 0) == LLMAAS_EINVAL);
    CHECK(llmaas_weights_claim_adapters(m->weights, info->name, adapters, 2) == LLMAAS_OK);
    CHECK(llmaas_weights_claim_adapters(m->weights, info->name, adapters, 2) == LLMAAS_EINVAL);
    free(a);
    free(b);
}

static void claim_part(model * m, const llmaas_tensor_info * info) {
    static const int64_t extents[] = {LLMAAS_ALL, 128, 64}, wrong[] = {0, -2};
    const bool           is_input  = strstr(info->name, "down") || strstr(info->name, "attn_output");
    const llmaas_axis    axis      = is_input ? LLMAAS_COLUMNS : LLMAAS_ROWS;
    CHECK(llmaas_weights_set_part(m->weights, info->name, extents, 3) == LLMAAS_EINVAL);
    CHECK(llmaas_weights_claim_part(m->weights, info->name, axis, wrong, 2) == LLMAAS_EINVAL);
    CHECK(llmaas_weights_claim_part(m->weights, info->name, axis, extents, 3) == LLMAAS_OK);
    CHECK(llmaas_weights_claim_part(m->weights, info->name, axis, extents, 3) == LLMAAS_EINVAL);
    if (is_input && info->ne[2] == 1 && one_in(2)) {
        claim_biases(m, info);
    }
    if (info->ne[2] == 1 && one_in(2)) {
        claim_adapters(m, info);
    }
    strcpy(m->parts[m->n_parts++], info->name);
}

static void claim(model * m, const llmaas_tensor_info * info, uint32_t * n_overrides) {
    if (m->claims & PART) {
        claim_part(m, info);
    }
    if (m->claims & TILES) {
        CHECK(llmaas_weights_claim_tiles(m->weights, info->name) == LLMAAS_OK);
    }
    if (m->claims & FROM_FILE) {
        CHECK(llmaas_weights_claim_file(m->weights, info->name, m->path, info->offset, false) == LLMAAS_OK);
    }
    if (is_looked_up(info->name)) {
        CHECK(llmaas_weights_claim_rows(m->weights, info->name, m->path, info->offset) == LLMAAS_OK);
        CHECK(llmaas_weights_claim_rows(m->weights, info->name, m->path, info->offset) == LLMAAS_EINVAL);
    }
    if (m->claims & (TILES | FROM_FILE)) {
        CHECK(*n_overrides < MAX_CLAIMED);
        char * pattern = patterns[*n_overrides];
        snprintf(pattern, sizeof *patterns, "^%s$", info->name);
        overrides[(*n_overrides)++] = (struct llama_model_tensor_buft_override){pattern, llmaas_buffer_type()};
    }
}

static void claim_all(model * m) {
    llmaas_tensor_info * infos;
    uint32_t             n, n_claimed = 0, n_overrides = 0;
    m->weights = llmaas_weights_new();
    CHECK(m->weights && llmaas_gguf_tensors(m->path, &infos, &n) == LLMAAS_OK);
    for (uint32_t i = 0; i < n; ++i) {
        const bool is_wanted = is_matrix(infos[i].name) || (m->claims == FROM_FILE && is_looked_up(infos[i].name));
        CHECK(i < MAX_TENSORS);
        if (is_wanted && (n_claimed == 0 || one_in(2))) {
            claim(m, &infos[i], &n_overrides);
            m->is_in_file[i] = m->claims & FROM_FILE;
            n_claimed++;
        }
    }
    overrides[n_overrides] = (struct llama_model_tensor_buft_override){0};
    llmaas_gguf_tensors_free(infos);
}

static bool stop_loading(float progress, void * user) {
    (void) progress, (void) user;
    return false;
}

void unload_model(model * m) {
    llama_model_free(m->llama);
    llmaas_weights_release(m->weights);
    *m = (model){0};
}

bool load_model(model * m, bool is_stopped) {
    struct llama_model_params params = llama_model_default_params();
    params.use_extra_bufts           = m->is_repacked;
    params.progress_callback         = is_stopped ? stop_loading : NULL;
    params.n_gpu_layers              = 0;
    overrides[0]                     = (struct llama_model_tensor_buft_override){0};
    if (m->claims) {
        claim_all(m);
        params.tensor_buft_overrides = overrides;
    }
    llmaas_load_begin(m->weights);
    m->llama = llama_model_load_from_file(m->path, params);
    llmaas_load_end(m->llama);
    CHECK((m->llama == NULL) == is_stopped);
    if (m->llama && strcmp(m->path, life.paths[0]) == 0) {
        m->adapter = llama_adapter_lora_init(m->llama, life.adapter);
        CHECK(m->adapter);
    }
    if (m->llama && m->weights && llmaas_weights_problem(m->weights, false)) {
        life.n_refused++;
        unload_model(m);
    }
    if (m->llama && m->claims & CHANNELS) {
        add_channels(m);
    }
    return m->llama != NULL;
}

bool do_load(void) {
    model * m = any_model(false);
    if (!m) {
        return false;
    }
    m->path        = life.paths[rnd_below(life.n_paths)];
    m->claims      = claim_kinds[rnd_below(N_CLAIMS)];
    m->is_repacked = m->claims & TILES || (!(m->claims & FROM_FILE) && !one_in(4));
    if (!load_model(m, one_in(10))) {
        llmaas_weights_release(m->weights);
        *m = (model){0};
    }
    return true;
}

/* Exchange extents. Level 0 stays whole, since results are compared there. Other levels are not whole, since graphs are
 * counted there, and keep some heads, since attention is tapped. */
bool do_exchange(void) {
    static const int64_t any[] = {0, 64, 96, 128, 192};
    model *              m      = any_model(true);
    if (!m || !m->n_parts) {
        return false;
    }
    const char *   name      = m->parts[rnd_below(m->n_parts)];
    const uint32_t first     = strstr(name, ".attn_") != NULL;
    const int64_t  extents[] = {LLMAAS_ALL, any[first + rnd_below(4)], any[first + rnd_below(4)]};
    CHECK(llmaas_weights_set_part(m->weights, name, extents, 2 + rnd_below(2)) == LLMAAS_OK);
    CHECK(llmaas_weights_set_part(m->weights, name, extents, 0) == LLMAAS_EINVAL);
    return true;
}

bool do_unload(void) {
    model * m = any_model(true);
    if (!m) {
        return false;
    }
    for (int i = 0; i < MAX_CONTEXTS; ++i) {
        if (life.contexts[i].of == m) {
            close_context(&life.contexts[i]);
        }
    }
    unload_model(m);
    return true;
}
