#include "attention_model.h"

#include "ggml-cpu.h"

#include <math.h>

enum { PARKED = 1000 }; /* added to positions of the context that is away: no query sees that far */

static float uniform(void) { return (float) (rnd() >> 40) / (float) (1 << 23) - 1.0f; }

static size_t key_size(const shape * of) { return ggml_row_size(of->type, of->d); }

uint8_t * key_at(const model * m, int layer, int cell, int head) {
    return m->keys[layer] + ((size_t) cell * (size_t) m->of.n_head_kv + (size_t) head) * key_size(&m->of);
}

model * model_new(shape of) {
    model * m = calloc(1, sizeof *m);
    CHECK(m);
    m->of      = of;
    m->density = llmaas_density_new(N_POS, N_LAYER, of.row_step, of.layer_step);
    CHECK(m->density);
    for (int layer = 0; layer < N_LAYER; ++layer) {
        m->keys[layer] = exact(N_CELLS * (size_t) of.n_head_kv * key_size(&of));
        memset(m->keys[layer], 0, N_CELLS * (size_t) of.n_head_kv * key_size(&of));
        memset(m->resident[layer], 0xff, sizeof m->resident[layer]);
    }
    return m;
}

void model_free(model * m) {
    llmaas_density_free(m->density);
    for (int layer = 0; layer < N_LAYER; ++layer) {
        free(m->keys[layer]);
    }
    free(m);
}

/* Store a token's key in the first free cell after `cell`. */
static int store_at(model * m, int layer, int position, int cell, bool is_noted) {
    while (m->resident[layer][cell] >= 0) {
        cell = (cell + 1) % N_CELLS;
    }
    m->resident[layer][cell] = position;
    m->is_noted[layer][cell] = is_noted;
    for (int head = 0; head < m->of.n_head_kv; ++head) {
        float key[MAX_D];
        for (int i = 0; i < m->of.d; ++i) {
            key[i] = 2.0f * uniform();
        }
        ggml_get_type_traits_cpu(m->of.type)->from_float(key, key_at(m, layer, cell, head), m->of.d);
    }
    return cell;
}

/* Store in a random free cell, a different one in each layer. */
static int store(model * m, int layer, int position) {
    return store_at(m, layer, position, (int) rnd_below(N_CELLS), m->density != NULL);
}

void restore(model * m, int from, int end, bool is_told) {
    for (int layer = 0; layer < N_LAYER; ++layer) {
        for (int position = from; position < end; ++position) {
            store_at(m, layer, position, 0, is_told);
        }
    }
}

void place(model * m, uint32_t kept, uint32_t n, const int32_t * cells) {
    CHECK(llmaas_density_place(m->density, kept, n, cells) == LLMAAS_OK);
    for (; kept < N_POS; ++kept) {
        m->sums[kept]   = 0.0;
        m->counts[kept] = 0;
    }
}

void switch_contexts(model * m) {
    for (int layer = 0; layer < N_LAYER; ++layer) {
        for (int cell = 0; cell < N_CELLS; ++cell) {
            int * at = &m->resident[layer][cell];
            if (*at >= 0) {
                *at += *at < PARKED ? PARKED : -PARKED;
            }
        }
    }
}

void forget_from(model * m, int position) {
    for (int layer = 0; layer < N_LAYER; ++layer) {
        for (int cell = 0; cell < N_CELLS; ++cell) {
            if (m->resident[layer][cell] >= position) {
                m->resident[layer][cell] = -1;
            }
        }
    }
}

/* Return a causal mask's value, with occasional holes, distances for ALiBi, and occasionally one head that differs. */
float mask_at(const model * m, int layer, int cell, int position, int head) {
    const int  at      = m->resident[layer][cell];
    const bool is_hole = (!m->of.has_no_holes && (at * 7 + position) % 11 == 3) || (m->of.has_head_masks && (at + head) % 5 == 4);
    if (at < 0 || at > position || (is_hole && at != position)) {
        return -INFINITY;
    }
    return m->of.max_bias > 0.0f ? (float) (at - position) : 0.0f;
}

static struct ggml_tensor * build_mask(struct ggml_context * ctx, const model * m, int layer, int from, int n_tokens) {
    const int            n_masks = m->of.has_head_masks ? m->of.n_head : 1;
    struct ggml_tensor * mask    = ggml_new_tensor_4d(ctx, m->of.mask_type, N_CELLS, n_tokens, n_masks, 1);
    for (int i = 0; i < N_CELLS * n_tokens * n_masks; ++i) {
        const int   cell = i % N_CELLS;
        const int   row  = i / N_CELLS % n_tokens;
        const float v    = mask_at(m, layer, cell, from + row, i / N_CELLS / n_tokens);
        if (mask->type == GGML_TYPE_F16) {
            ((ggml_fp16_t *) mask->data)[i] = ggml_fp32_to_fp16(v);
        } else {
            ((float *) mask->data)[i] = v;
        }
    }
    return mask;
}

/* Build a layer's attention node as llama.cpp does: queries and keys are permuted views. */
static struct ggml_tensor * build_node(
    struct ggml_context * ctx, const model * m, int layer, struct ggml_tensor * query, struct ggml_tensor * mask,
    struct ggml_tensor * sinks) {
    const shape *        of    = &m->of;
    const float          scale = 1.0f / sqrtf((float) of->d);
    struct ggml_tensor * keys  = ggml_new_tensor_3d(ctx, of->type, of->d, of->n_head_kv, N_CELLS);
    keys->data                 = m->keys[layer]; /* ASan sees reads beyond the last cell */
    struct ggml_tensor * q     = ggml_permute(ctx, query, 0, 2, 1, 3);
    struct ggml_tensor * k     = ggml_permute(ctx, keys, 0, 2, 1, 3);
    if (!of->is_soft_max) {
        struct ggml_tensor * node = ggml_flash_attn_ext(ctx, q, k, k, mask, scale, of->max_bias, of->softcap);
        ggml_flash_attn_ext_add_sinks(node, sinks);
        return node;
    }
    struct ggml_tensor * kq = ggml_mul_mat(ctx, k, q);
    if (of->softcap != 0.0f) {
        kq = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, kq, scale / of->softcap)), of->softcap);
    }
    struct ggml_tensor * node = ggml_soft_max_ext(ctx, kq, mask, of->softcap != 0.0f ? 1.0f : scale, of->max_bias);
    ggml_soft_max_add_sinks(node, sinks);
    struct ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, node);
    CHECK(ggml_graph_compute_with_ctx(ctx, graph, 1) == GGML_STATUS_SUCCESS);
    return node;
}

/* Return whether a query is sampled. Without flash attention, the tap does not know which heads share keys. */
static bool is_sampled(const shape * of, int layer, int position, int head, uint32_t weight) {
    const int      group = of->is_soft_max ? head : head / (of->n_head / of->n_head_kv);
    const uint32_t turn  = (uint32_t) (position + 5 * layer + (weight == 1 ? 3 * group : 0));
    const uint32_t step  = weight * of->row_step;
    return turn % step == step - 1;
}

void evaluate(model * m, int from, int n_tokens) {
    struct ggml_context * ctx       = context_new();
    struct ggml_tensor *  positions = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_tokens);
    struct ggml_tensor *  sinks     = m->of.has_sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, m->of.n_head) : NULL;
    llmaas_tap_view       views[N_LAYER];
    int                   n_views = 0;
    const uint32_t        weight  = (uint32_t) n_tokens < m->of.row_step ? 4 : 1;
    for (int i = 0; i < n_tokens; ++i) {
        ((int32_t *) positions->data)[i] = from + i;
    }
    for (int head = 0; sinks && head < m->of.n_head; ++head) {
        ((float *) sinks->data)[head] = uniform();
    }
    for (int layer = 0; layer < N_LAYER; ++layer) {
        struct ggml_tensor * cells = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n_tokens);
        struct ggml_tensor * query = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, m->of.d, m->of.n_head, n_tokens);
        for (int i = 0; i < n_tokens; ++i) {
            ((int64_t *) cells->data)[i] = store(m, layer, from + i);
        }
        for (int64_t i = 0; i < ggml_nelements(query); ++i) {
            ((float *) query->data)[i] = uniform();
        }
        if (!m->density || !llmaas_density_tap(m->density).wants(m->density, layer)) {
            continue;
        }
        for (int i = 0; n_views == 0 && i < n_tokens && from + i < N_POS; ++i) {
            m->sums[from + i]   = 0.0;
            m->counts[from + i] = 0;
        }
        for (int row = 0; row < n_tokens * m->of.n_head; ++row) {
            const int position = from + row / m->of.n_head;
            if (is_sampled(&m->of, layer, position, row % m->of.n_head, weight)) {
                expect_row(m, layer, position, row % m->of.n_head, (const float *) query->data + row * m->of.d,
                           sinks ? sinks->data : NULL, weight);
            }
        }
        struct ggml_tensor * mask = build_mask(ctx, m, layer, from, n_tokens);
        views[n_views]            = (llmaas_tap_view){
                       .kind      = LLMAAS_TAP_ATTENTION,
                       .layer     = layer,
                       .is_first  = n_views == 0,
                       .node      = build_node(ctx, m, layer, query, mask, sinks),
                       .cells     = cells,
                       .positions = positions,
        };
        ++n_views;
    }
    if (m->density) {
        run_tap(llmaas_density_tap(m->density), views, n_views, m->of.n_threads);
    }
    ggml_free(ctx);
}

void check_density(const model * m) {
    double   sums[N_POS];
    uint64_t counts[N_POS];
    CHECK(llmaas_density_read(m->density, N_POS, sums, counts) == LLMAAS_OK);
    for (int i = 0; i < N_POS; ++i) {
        CHECK(counts[i] == m->counts[i]);
        CHECK(fabs(sums[i] - m->sums[i]) <= m->of.tolerance * m->sums[i]);
    }
}
