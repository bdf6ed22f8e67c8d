/* Memory layout of ggml's backend interface, whose header llama-cpp-python does not install: versions 2 and 3. The two
 * differ in buffer types only.
 *
 * llmaas_abi_problem() compares these declarations with the ggml of this process before anything else uses them. */
#ifndef LLMAAS_ABI_H
#define LLMAAS_ABI_H

#include "base/ops.h"

#include <stddef.h>

#define LLMAAS_OLDEST_API 2
#define LLMAAS_NEWEST_API 3

/* Return the version of the backend interface of this process's ggml. */
int llmaas_api_version(void);

/* Return one sentence that says how the ggml of this process differs, or NULL if it does not. */
const char * llmaas_abi_problem(void);

/* A function that we only pass on; its signature does not matter here. */
typedef void (*llmaas_opaque)(void);

/* A buffer type in version 2. ggml_backend_buffer_type itself stays incomplete, since it can be either of the two. */
struct llmaas_buffer_type_2 {
    const char * (*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t size);
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    llmaas_opaque get_max_size;
    llmaas_opaque get_alloc_size;
    bool (*is_host)(ggml_backend_buffer_type_t);
    ggml_backend_dev_t device;
    void *             context;
};

/* A buffer type in version 3, which adds two functions for lists of tensors. Where these are NULL, ggml goes through a
 * list itself. */
struct llmaas_buffer_type_3 {
    const char * (*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t size);
    llmaas_opaque alloc_buffer_n;
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    llmaas_opaque get_max_size;
    llmaas_opaque get_alloc_size;
    llmaas_opaque get_alloc_size_n;
    bool (*is_host)(ggml_backend_buffer_type_t);
    ggml_backend_dev_t device;
    void *             context;
};

struct ggml_backend_buffer_i {
    void (*free_buffer)(ggml_backend_buffer_t);
    void * (*get_base)(ggml_backend_buffer_t);
    enum ggml_status (*init_tensor)(ggml_backend_buffer_t, struct ggml_tensor *);
    void (*memset_tensor)(ggml_backend_buffer_t, struct ggml_tensor *, uint8_t value, size_t offset, size_t size);
    void (*set_tensor)(ggml_backend_buffer_t, struct ggml_tensor *, const void * data, size_t offset, size_t size);
    void (*get_tensor)(ggml_backend_buffer_t, const struct ggml_tensor *, void * data, size_t offset, size_t size);
    llmaas_opaque set_tensor_2d;
    llmaas_opaque get_tensor_2d;
    llmaas_opaque cpy_tensor;
    void (*clear)(ggml_backend_buffer_t, uint8_t value);
    llmaas_opaque reset;
};

struct ggml_backend_buffer {
    struct ggml_backend_buffer_i   iface;
    ggml_backend_buffer_type_t     buft;
    void *                         context;
    size_t                         size;
    enum ggml_backend_buffer_usage usage;
};

ggml_backend_buffer_t ggml_backend_buffer_init(
    ggml_backend_buffer_type_t buft, struct ggml_backend_buffer_i iface, void * context, size_t size);

struct ggml_backend_i {
    const char * (*get_name)(ggml_backend_t);
    void (*free)(ggml_backend_t);
    llmaas_opaque set_tensor_async;
    llmaas_opaque get_tensor_async;
    llmaas_opaque set_tensor_2d_async;
    llmaas_opaque get_tensor_2d_async;
    llmaas_opaque cpy_tensor_async;
    llmaas_opaque synchronize;
    llmaas_opaque graph_plan_create;
    llmaas_opaque graph_plan_free;
    llmaas_opaque graph_plan_update;
    llmaas_opaque graph_plan_compute;
    enum ggml_status (*graph_compute)(ggml_backend_t, struct ggml_cgraph *);
    llmaas_opaque event_record;
    llmaas_opaque event_wait;
    /* Called once for each part of a new graph, before memory is assigned to its tensors. */
    void (*graph_optimize)(ggml_backend_t, struct ggml_cgraph *, void * params);
};

struct ggml_backend {
    ggml_guid_t           guid;
    struct ggml_backend_i iface;
    ggml_backend_dev_t    device;
    void *                context;
};

struct ggml_backend_device_i {
    const char * (*get_name)(ggml_backend_dev_t);
    const char * (*get_description)(ggml_backend_dev_t);
    void (*get_memory)(ggml_backend_dev_t, size_t * free, size_t * total);
    enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t);
    void (*get_props)(ggml_backend_dev_t, struct ggml_backend_dev_props *);
    ggml_backend_t (*init_backend)(ggml_backend_dev_t, const char * params);
    ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t);
    ggml_backend_buffer_type_t (*get_host_buffer_type)(ggml_backend_dev_t);
    ggml_backend_buffer_t (*buffer_from_host_ptr)(ggml_backend_dev_t, void * ptr, size_t size, size_t max_tensor_size);
    bool (*supports_op)(ggml_backend_dev_t, const struct ggml_tensor * op);
    bool (*supports_buft)(ggml_backend_dev_t, ggml_backend_buffer_type_t);
    bool (*offload_op)(ggml_backend_dev_t, const struct ggml_tensor * op);
    llmaas_opaque event_new;
    llmaas_opaque event_free;
    llmaas_opaque event_synchronize;
};

struct ggml_backend_device {
    struct ggml_backend_device_i iface;
    ggml_backend_reg_t           reg;
    void *                       context;
};

struct ggml_backend_reg_i {
    const char * (*get_name)(ggml_backend_reg_t);
    size_t (*get_device_count)(ggml_backend_reg_t);
    ggml_backend_dev_t (*get_device)(ggml_backend_reg_t, size_t index);
    void * (*get_proc_address)(ggml_backend_reg_t, const char * name);
};

struct ggml_backend_reg {
    int                       api_version;
    struct ggml_backend_reg_i iface;
    void *                    context;
};

/* The node list that ggml-cpu walks. Its hash set and use counts tell ggml-cpu which nodes it may fuse; a shallow copy
 * with another node list keeps them. */
struct ggml_cgraph {
    int                   size;
    int                   n_nodes;
    int                   n_leafs;
    struct ggml_tensor ** nodes;
    struct ggml_tensor ** grads;
    struct ggml_tensor ** grad_accs;
    struct ggml_tensor ** leafs;
    int32_t *             use_counts;
    struct {
        size_t                size;
        uint32_t *            used;
        struct ggml_tensor ** keys;
    } visited_hash_set;
    int      order;
    uint64_t uid;
};

/* Return how often the graph's nodes use `tensor` as an operand. For a part of a graph, count the uses in the whole
 * graph. */
int32_t llmaas_graph_uses(const struct ggml_cgraph * graph, const struct ggml_tensor * tensor);

/* Operation parameters of GGML_OP_CUSTOM. */
struct llmaas_custom_params {
    ggml_custom_op_t fun;
    int              n_tasks;
    void *           userdata;
};

#endif
