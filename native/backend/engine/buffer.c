/* The buffer type for claimed weights whose source keeps the bytes elsewhere.
 *
 * llama.cpp also puts a claimed weight's LoRA matrices here, so tensors that nobody claimed get memory like in any
 * buffer. Address space is reserved for all tensors, but only unclaimed ones use it: unwritten pages cost nothing. */
#include "engine/buffer.h"

#include "base/abi.h"
#include "base/fork_lock.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ALIGNMENT 64

static _Thread_local llmaas_weights * loading;

struct owner {
    llmaas_weights * weights;
    void *           base;
    const void *     model; /* whose load allocated the buffer; NULL while it is loaded, and for adapters */
    struct owner *   next;
};

/* The owners of all buffers. Every change is a single store, so that a forked child always finds a whole list. */
static struct owner *   owners;
static llmaas_fork_lock lock;

static void init_lock(void) { llmaas_fork_lock_init(&lock, NULL); }

static void lock_owners(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, init_lock);
    pthread_mutex_lock(&lock.mutex);
}

static void add(struct owner * owner) {
    lock_owners();
    owner->next = owners;
    owners      = owner;
    pthread_mutex_unlock(&lock.mutex);
}

static void take_out(const struct owner * owner) {
    lock_owners();
    struct owner ** at = &owners;
    while (*at != owner) {
        at = &(*at)->next;
    }
    *at = owner->next;
    pthread_mutex_unlock(&lock.mutex);
}

void llmaas_buffers_begin(llmaas_weights * weights) { loading = weights; }

void llmaas_buffers_end(const void * model) {
    lock_owners();
    for (struct owner * owner = owners; owner; owner = owner->next) {
        if (loading && owner->weights == loading) {
            owner->model = model;
        }
    }
    pthread_mutex_unlock(&lock.mutex);
    loading = NULL;
}

bool llmaas_model_has_buffers(const void * model) {
    bool is_found = false;
    lock_owners();
    for (const struct owner * owner = owners; model && owner && !is_found; owner = owner->next) {
        is_found = owner->model == model;
    }
    pthread_mutex_unlock(&lock.mutex);
    return is_found;
}

static void destroy(ggml_backend_buffer_t buffer) {
    struct owner * owner = buffer->context;
    take_out(owner);
    munmap(owner->base, buffer->size);
    llmaas_weights_release(owner->weights);
    free(owner);
}

static void * get_base(ggml_backend_buffer_t buffer) { return ((struct owner *) buffer->context)->base; }

/* Return the claimed weight that `tensor` is, or NULL. The result is used without the lock: no graph has the weight
 * before its model is loaded. */
static const llmaas_weight * claimed(ggml_backend_buffer_t buffer, const struct ggml_tensor * tensor) {
    const struct owner * owner = buffer->context;
    if (!owner->weights) {
        return NULL;
    }
    llmaas_weights_lock(owner->weights);
    const llmaas_weight * weight = llmaas_weights_find(owner->weights, tensor);
    llmaas_weights_unlock(owner->weights);
    return weight && weight->source->load ? weight : NULL;
}

static enum ggml_status init_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor) {
    const struct owner * owner = buffer->context;
    if (owner->weights) {
        llmaas_weights_loaded(owner->weights, tensor);
    }
    return GGML_STATUS_SUCCESS;
}

static void set_tensor(
    ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    const llmaas_weight * weight = claimed(buffer, tensor);
    if (!weight) {
        memcpy((char *) tensor->data + offset, data, size);
    } else if (offset == 0 && size == ggml_nbytes(tensor)) {
        weight->source->load((llmaas_weight *) weight, data); /* problem() finds a failure */
    } else {
        GGML_ABORT("%s is set in pieces", tensor->name);
    }
}

static void memset_tensor(
    ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    memset((char *) tensor->data + offset, value, size);
    (void) buffer;
}

static void get_tensor(
    ggml_backend_buffer_t buffer, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    if (claimed(buffer, tensor)) {
        GGML_ABORT("%s is not in memory as the model file has it", tensor->name);
    }
    memcpy(data, (const char *) tensor->data + offset, size);
}

static void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    if (value != 0) { /* new memory is already zero */
        memset(get_base(buffer), value, buffer->size);
    }
}

static const char * get_name(ggml_backend_buffer_type_t type) {
    (void) type;
    return "LLMAAS";
}

static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    static const struct ggml_backend_buffer_i iface = {
        .free_buffer   = destroy,
        .get_base      = get_base,
        .init_tensor   = init_tensor,
        .memset_tensor = memset_tensor,
        .set_tensor    = set_tensor,
        .get_tensor    = get_tensor,
        .clear         = clear,
    };
    struct owner * owner = malloc(sizeof *owner);
    void *         base  = mmap(
        NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); /* ggml itself handles
                                                                                                  * size 0 */
    if (!owner || base == MAP_FAILED) {
        free(owner);
        if (base != MAP_FAILED) {
            munmap(base, size);
        }
        return NULL;
    }
    *owner = (struct owner) {.weights = llmaas_weights_retain(loading), .base = base};
    add(owner);
    return ggml_backend_buffer_init(type, iface, owner, size);
}

static size_t get_alignment(ggml_backend_buffer_type_t type) {
    (void) type;
    return ALIGNMENT;
}

/* Claim not to be host memory: then llama.cpp hands us the bytes instead of reading the file into a claimed weight's
 * pages. */
static bool is_host(ggml_backend_buffer_type_t type) {
    (void) type;
    return false;
}

#define SLOTS .get_name = get_name, .alloc_buffer = alloc_buffer, .get_alignment = get_alignment, .is_host = is_host

/* Each union is as large as the larger layout, so that nothing is read past its end before the layouts are checked. */
ggml_backend_buffer_type_t llmaas_buffers(void) {
    static union {
        struct llmaas_buffer_type_2 as_2;
        struct llmaas_buffer_type_3 as_3;
    } two = {.as_2 = {SLOTS, .device = &llmaas_device}}, three = {.as_3 = {SLOTS, .device = &llmaas_device}};
    return (ggml_backend_buffer_type_t) (llmaas_api_version() == 2 ? &two : &three);
}

/* Ask for the device only: with another layout, any other question could call something that is not a function. */
const char * llmaas_buffers_problem(void) {
    const bool same = ggml_backend_buft_get_device(llmaas_buffers()) == &llmaas_device;
    return same ? NULL : "the buffer type's interface has another layout";
}
