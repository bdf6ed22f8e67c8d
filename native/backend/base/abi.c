/* Checks of our declarations of ggml's interfaces against the ggml of this process. */
#include "base/abi.h"

#include <stdio.h>
#include <string.h>

static char problem[256];

#define DIFFERS(...) return (void) snprintf(problem, sizeof problem, __VA_ARGS__), problem

int llmaas_api_version(void) { return ggml_backend_cpu_reg()->api_version; }

static const char * check_versions(void) {
    const int version = llmaas_api_version();
    if (version < LLMAAS_OLDEST_API || version > LLMAAS_NEWEST_API) {
        DIFFERS("its backend interface has version %d, expected %d or %d", version, LLMAAS_OLDEST_API, LLMAAS_NEWEST_API);
    }
    if (ggml_tensor_overhead() <= sizeof(struct ggml_tensor) || ggml_tensor_overhead() > sizeof(struct ggml_tensor) + 64) {
        DIFFERS("a tensor takes %zu bytes, expected about %zu", ggml_tensor_overhead(), sizeof(struct ggml_tensor));
    }
    return NULL;
}

/* So far, ggml has added new types only at the end of the enum, so known types keep their numbers. */
static const char * check_types(void) {
    static const struct {
        enum ggml_type type;
        const char *   name;
    } types[] = {
        {GGML_TYPE_F32, "f32"},   {GGML_TYPE_F16, "f16"},       {GGML_TYPE_I32, "i32"},     {GGML_TYPE_I64, "i64"},
        {GGML_TYPE_Q4_0, "q4_0"}, {GGML_TYPE_IQ4_NL, "iq4_nl"}, {GGML_TYPE_MXFP4, "mxfp4"}, {GGML_TYPE_Q2_K, "q2_K"},
        {GGML_TYPE_Q4_K, "q4_K"}, {GGML_TYPE_Q8_0, "q8_0"},     {GGML_TYPE_Q8_K, "q8_K"},
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (strcmp(ggml_type_name(types[i].type), types[i].name) != 0) {
            DIFFERS("type %d is %s, expected %s", types[i].type, ggml_type_name(types[i].type), types[i].name);
        }
    }
    return NULL;
}

/* The member after an interface is where we expect it only if the interface has the size we expect. */
static const char * check_interfaces(void) {
    const ggml_backend_reg_t reg = ggml_backend_cpu_reg();
    const ggml_backend_dev_t dev = ggml_backend_reg_dev_get(reg, 0);
    if (strcmp(reg->iface.get_name(reg), ggml_backend_reg_name(reg)) != 0 || reg->iface.get_device(reg, 0) != dev) {
        DIFFERS("the registry's interface has another layout");
    }
    if (dev->reg != reg || strcmp(dev->iface.get_name(dev), ggml_backend_dev_name(dev)) != 0) {
        DIFFERS("the device's interface has another layout");
    }
    const ggml_backend_t cpu = ggml_backend_cpu_init();
    if (!cpu) {
        DIFFERS("its CPU backend cannot be started");
    }
    const bool same = cpu->device == dev && ggml_backend_get_device(cpu) == dev && cpu->iface.graph_compute &&
                      strcmp(cpu->iface.get_name(cpu), ggml_backend_name(cpu)) == 0;
    ggml_backend_free(cpu);
    if (!same) {
        DIFFERS("the backend's interface has another layout");
    }
    return NULL;
}

static const char * check_buffers(void) {
    const ggml_backend_buffer_type_t type   = ggml_backend_cpu_buffer_type();
    const ggml_backend_buffer_t      buffer = ggml_backend_buft_alloc_buffer(type, 192);
    if (!buffer) {
        DIFFERS("it cannot allocate 192 bytes");
    }
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    const bool same = buffer->buft == type && buffer->size == ggml_backend_buffer_get_size(buffer) &&
                      buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS &&
                      buffer->iface.get_base(buffer) == ggml_backend_buffer_get_base(buffer);
    ggml_backend_buffer_free(buffer);
    if (!same) {
        DIFFERS("the buffer's interface has another layout");
    }
    return NULL;
}

static void nothing(struct ggml_tensor * dst, int ith, int nth, void * user) {
    (void) dst, (void) ith, (void) nth, (void) user;
}

/* Walk ggml's hash set: open addressing by address. */
int32_t llmaas_graph_uses(const struct ggml_cgraph * graph, const struct ggml_tensor * tensor) {
    const size_t size = graph->visited_hash_set.size;
    size_t       at   = ((uintptr_t) tensor >> 4) % size;
    for (size_t n = 0; n < size && graph->visited_hash_set.used[at / 32] >> (at % 32) & 1; n++) {
        if (graph->visited_hash_set.keys[at] == tensor) {
            return graph->use_counts[at];
        }
        at = at + 1 < size ? at + 1 : 0;
    }
    return 0;
}

/* Check a graph with a node that is used twice: its use counts and hash set must show that where we look for them. */
static bool same_graph(struct ggml_context * ctx) {
    struct ggml_tensor * a = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 8);
    struct ggml_tensor * b = ggml_scale(ctx, a, 2.0f);
    struct ggml_tensor * c = ggml_add(ctx, b, b);
    struct ggml_tensor * d = ggml_custom_4d(ctx, GGML_TYPE_F32, 1, 1, 1, 1, &c, 1, nothing, 3, ctx);
    struct llmaas_custom_params custom;
    memcpy(&custom, d->op_params, sizeof custom);
    if (custom.fun != nothing || custom.n_tasks != 3 || custom.userdata != ctx) {
        return false;
    }
    struct ggml_cgraph * graph = ggml_new_graph_custom(ctx, 16, false);
    ggml_build_forward_expand(graph, d);
    if (graph->size != ggml_graph_size(graph) || graph->n_nodes != 3 || ggml_graph_n_nodes(graph) != 3 ||
        graph->nodes != ggml_graph_nodes(graph) || graph->n_leafs != 1 || graph->leafs[0] != a) {
        return false;
    }
    return llmaas_graph_uses(graph, a) == 1 && llmaas_graph_uses(graph, b) == 2 && llmaas_graph_uses(graph, c) == 1 &&
           llmaas_graph_uses(graph, d) == 0;
}

static const char * check_graphs(void) {
    const struct ggml_init_params params = {.mem_size = 16 * ggml_tensor_overhead() + ggml_graph_overhead_custom(16, false),
                                            .no_alloc = true};
    struct ggml_context * ctx = ggml_init(params);
    if (!ctx) {
        DIFFERS("it cannot make a context");
    }
    const bool same = same_graph(ctx);
    ggml_free(ctx);
    if (!same) {
        DIFFERS("a graph or a custom operation has another layout");
    }
    return NULL;
}

const char * llmaas_abi_problem(void) {
    const char * (*const checks[])(void) = {
        check_versions, llmaas_ops_problem, check_types, check_interfaces, check_buffers, check_graphs,
    };
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        const char * found = checks[i]();
        if (found) {
            return found;
        }
    }
    return NULL;
}
