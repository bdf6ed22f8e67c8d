/* Models of random values, without llama.cpp. */
#include "engine_threads.h"

#include "base/cpu.h"
#include "ggml-alloc.h"
#include "ggml-cpu.h"

#include <unistd.h>

static const struct {
    const char * name;
    int          n_columns, n_rows;
} shapes[N_KINDS] = {
    {"attn_norm", D, 1}, {"attn_q", D, D},   {"attn_k", D, D_KV},  {"attn_v", D, D_KV},   {"attn_output", D, D},
    {"ffn_norm", D, 1},  {"ffn_gate", D, FF}, {"ffn_up", D, FF}, {"ffn_down", FF, D},
};

struct ggml_context * new_context(size_t n_tensors) {
    const size_t size = n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(N_GRAPH, false);
    struct ggml_context * ctx = ggml_init((struct ggml_init_params){.mem_size = size, .no_alloc = true});
    CHECK(ctx);
    return ctx;
}

/* Return values that depend on the size only, so that every model computes the same. */
static uint8_t * weight_bytes(const struct ggml_tensor * tensor) {
    const int64_t n      = ggml_nelements(tensor);
    float *       values = malloc((size_t) n * sizeof *values);
    for (int64_t i = 0; i < n; ++i) {
        values[i] = (float) ((uint64_t) i * 2654435761u % 1000) / 5000.0f - 0.1f;
    }
    uint8_t * bytes = exact(ggml_nbytes(tensor));
    if (tensor->type == GGML_TYPE_F32) {
        memcpy(bytes, values, ggml_nbytes(tensor));
    } else {
        ggml_quantize_chunk(tensor->type, values, bytes, 0, tensor->ne[1], tensor->ne[0], NULL);
    }
    free(values);
    return bytes;
}

/* Claim a feed-forward weight. */
static void claim(model * m, const struct ggml_tensor * tensor, bool is_input) {
    static const int64_t extents[] = {LLMAAS_ALL, 96, 64, 32};
    const llmaas_axis    axis      = is_input ? LLMAAS_COLUMNS : LLMAAS_ROWS;
    CHECK(llmaas_weights_claim_part(m->weights, tensor->name, axis, extents, 4) == LLMAAS_OK);
    if (m->kind == TILED) {
        CHECK(llmaas_weights_claim_tiles(m->weights, tensor->name) == LLMAAS_OK);
    }
}

/* Write the feed-forward weights to a file, one after another, and claim them there. Claims come after the last write,
 * because a file that changes after its first claim is refused. */
static void claim_file(model * m) {
    uint64_t  offsets[N_LAYER * N_KINDS], offset = 0;
    int       n  = 0;
    const int fd = mkstemp(m->path);
    CHECK(fd >= 0);
    for (struct ggml_tensor * t = ggml_get_first_tensor(m->special_ctx); t; t = ggml_get_next_tensor(m->special_ctx, t)) {
        uint8_t * bytes = weight_bytes(t);
        CHECK(write(fd, bytes, ggml_nbytes(t)) == (ssize_t) ggml_nbytes(t));
        free(bytes);
        offsets[n++] = offset;
        offset += ggml_nbytes(t);
    }
    CHECK(close(fd) == 0);
    n = 0;
    for (struct ggml_tensor * t = ggml_get_first_tensor(m->special_ctx); t; t = ggml_get_next_tensor(m->special_ctx, t)) {
        CHECK(llmaas_weights_claim_file(m->weights, t->name, m->path, offsets[n++], false) == LLMAAS_OK);
    }
    CHECK(unlink(m->path) == 0);
}

/* Claim half of the heads, and fewer than a group of them; the weights stay in place. */
static void claim_heads(model * m, const struct ggml_tensor * tensor, llmaas_axis axis) {
    static const int64_t extents[] = {LLMAAS_ALL, D / 2, HEAD};
    CHECK(llmaas_weights_claim_part(m->weights, tensor->name, axis, extents, 3) == LLMAAS_OK);
}

static void add_layer(model * m, int layer) {
    for (int kind = 0; kind < N_KINDS; ++kind) {
        const bool            is_norm = shapes[kind].n_rows == 1;
        struct ggml_context * ctx     = kind >= GATE ? m->special_ctx : m->plain_ctx;
        struct ggml_tensor *  tensor  = ggml_new_tensor_2d(
            ctx, is_norm ? GGML_TYPE_F32 : GGML_TYPE_Q4_0, shapes[kind].n_columns, shapes[kind].n_rows);
        ggml_format_name(tensor, "blk.%d.%s.weight", layer, shapes[kind].name);
        m->tensors[layer][kind] = tensor;
        if (kind >= GATE) {
            claim(m, tensor, kind == DOWN);
        } else if (kind == Q || kind == OUT) {
            claim_heads(m, tensor, kind == Q ? LLMAAS_ROWS : LLMAAS_COLUMNS);
        }
    }
}

static ggml_backend_buffer_t fill(struct ggml_context * ctx, ggml_backend_buffer_type_t type) {
    const ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, type);
    CHECK(buffer);
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    for (struct ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        uint8_t * bytes = weight_bytes(t);
        ggml_backend_tensor_set(t, bytes, 0, ggml_nbytes(t));
        free(bytes);
    }
    return buffer;
}

static ggml_backend_buffer_type_t special_type(model_kind kind) {
    const ggml_backend_buffer_type_t repacked = llmaas_repack_type();
    return kind != REPACKED ? llmaas_buffer_type() : repacked ? repacked : ggml_backend_cpu_buffer_type();
}

void load_model(model * m, model_kind kind) {
    *m = (model){.kind = kind, .weights = llmaas_weights_new(), .path = "/tmp/engine_threads.XXXXXX"};
    CHECK(m->weights);
    m->plain_ctx   = new_context(N_LAYER * N_KINDS + 2);
    m->special_ctx = new_context(N_LAYER * N_KINDS);
    for (int layer = 0; layer < N_LAYER; ++layer) {
        add_layer(m, layer);
    }
    if (kind == ON_DISK) {
        claim_file(m);
    }
    m->norm   = ggml_set_name(ggml_new_tensor_2d(m->plain_ctx, GGML_TYPE_F32, D, 1), "output_norm.weight");
    m->output = ggml_set_name(ggml_new_tensor_2d(m->plain_ctx, GGML_TYPE_Q4_0, D, N_OUT), "output.weight");
    llmaas_load_begin(m->weights);
    m->plain_buffer   = fill(m->plain_ctx, ggml_backend_cpu_buffer_type());
    m->special_buffer = fill(m->special_ctx, special_type(kind));
    llmaas_load_end(m);
    CHECK(!llmaas_weights_problem(m->weights, false));
}

void unload_model(model * m) {
    ggml_backend_buffer_free(m->plain_buffer);
    ggml_backend_buffer_free(m->special_buffer);
    ggml_free(m->plain_ctx);
    ggml_free(m->special_ctx);
    llmaas_weights_release(m->weights);
}
