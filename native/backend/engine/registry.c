/* The device that makes engines, and its entry in ggml's registry. The registry has no lock, and other threads read it
 * at any time, in calls that nobody announces. So it changes only in llmaas_register and llmaas_unregister. */
#include "base/cpu.h"
#include "engine/buffer.h"
#include "engine/engine.h"

#include <stdio.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t  idle = PTHREAD_COND_INITIALIZER; /* signaled when an announced call ends */
static uint32_t        n_users;  /* calls of llmaas_register minus calls of llmaas_unregister */
static uint32_t        n_calls;  /* loads and creations in progress */
static uint32_t        n_engines;
static bool            is_registered;

/* Announced calls that this thread is inside. A callback of such a call may unregister, and must not wait for
 * itself. */
static _Thread_local uint32_t n_calls_here;

/* The context that this thread is creating. */
static _Thread_local struct {
    bool             is_on;
    llmaas_weights * weights;
    llmaas_engine *  made;
} creation;

/* -- thread pools ------------------------------------------------------------------------------------------------ */

/* llama.cpp gives a context's thread pool only to its own CPU backend, just before each graph, through a function that
 * it gets from ggml-cpu's registry. While our backend is registered or an engine exists, we replace that function so
 * that we learn of the pool. */
static void * (*cpu_proc_address)(ggml_backend_reg_t, const char *);

static void set_threadpool(ggml_backend_t backend, ggml_threadpool_t pool) {
    llmaas_engine_next_threadpool(pool);
    ggml_backend_cpu_set_threadpool(backend, pool);
}

static void * get_cpu_proc_address(ggml_backend_reg_t reg, const char * name) {
    if (strcmp(name, "ggml_backend_cpu_set_threadpool") == 0) {
        return (void *) set_threadpool;
    }
    return cpu_proc_address(reg, name);
}

/* -- the device -------------------------------------------------------------------------------------------------- */

static const char * get_name(ggml_backend_dev_t dev) {
    (void) dev;
    return "LLMAAS";
}

static const char * get_description(ggml_backend_dev_t dev) {
    (void) dev;
    return "ggml-cpu, with the plugins of llmaas_plugins";
}

static void get_memory(ggml_backend_dev_t dev, size_t * free_bytes, size_t * total) {
    (void) dev;
    *free_bytes = *total = 0; /* it is the CPU's memory, which the CPU device reports */
}

static enum ggml_backend_dev_type get_type(ggml_backend_dev_t dev) {
    (void) dev;
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

static void get_props(ggml_backend_dev_t dev, struct ggml_backend_dev_props * props) {
    memset(props, 0, sizeof *props);
    props->name        = get_name(dev);
    props->description = get_description(dev);
    props->type        = get_type(dev);
}

/* Create an engine for an announced context; any other context gets a plain CPU backend. */
static ggml_backend_t init_backend(ggml_backend_dev_t dev, const char * params) {
    (void) params;
    if (!creation.is_on || creation.made) {
        return ggml_backend_cpu_init();
    }
    creation.made = llmaas_engine_new(dev, creation.weights);
    if (!creation.made) {
        return NULL;
    }
    pthread_mutex_lock(&lock);
    n_engines++;
    pthread_mutex_unlock(&lock);
    return &creation.made->base;
}

static ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t dev) {
    (void) dev;
    return ggml_backend_cpu_buffer_type(); /* graph results are allocated here */
}

static bool is_ours(const struct ggml_tensor * tensor) {
    return tensor && tensor->buffer && ggml_backend_buffer_get_type(tensor->buffer) == llmaas_buffers();
}

/* Support what ggml-cpu supports, also for weights in our buffers, which ggml-cpu itself would reject. */
static bool supports_op(ggml_backend_dev_t dev, const struct ggml_tensor * op) {
    (void) dev;
    if (!is_ours(op->src[0])) {
        return ggml_backend_dev_supports_op(llmaas_cpu_device(), op);
    }
    struct ggml_tensor weight = *op->src[0], plain = *op;
    weight.buffer = NULL;
    plain.src[0]  = &weight;
    const bool is_lookup =
        llmaas_op_of(op) == LLMAAS_OP_GET_ROWS && op->src[1]->type == GGML_TYPE_I32 && ggml_is_vector(op->src[1]);
    return ((llmaas_is_product(op) && op->src[1]->type == GGML_TYPE_F32) || is_lookup) &&
           ggml_backend_dev_supports_op(llmaas_cpu_device(), &plain);
}

static bool supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t type) {
    (void) dev;
    return type == llmaas_buffers() || ggml_backend_dev_supports_buft(llmaas_cpu_device(), type);
}

/* -- the registry ------------------------------------------------------------------------------------------------ */

static const char * reg_name(ggml_backend_reg_t reg) {
    (void) reg;
    return "LLMAAS";
}

static size_t reg_device_count(ggml_backend_reg_t reg) {
    (void) reg;
    return 1;
}

static ggml_backend_dev_t reg_device(ggml_backend_reg_t reg, size_t index) {
    (void) reg;
    return index == 0 ? &llmaas_device : NULL;
}

/* Engines are CPU backends, so ggml-cpu's functions set their threads and abort callback. Features are not repeated,
 * since ggml-cpu lists them. */
static void * reg_proc_address(ggml_backend_reg_t reg, const char * name) {
    (void) reg;
    if (strcmp(name, "ggml_backend_get_features") == 0) {
        return NULL;
    }
    return ggml_backend_reg_get_proc_address(ggml_backend_cpu_reg(), name);
}

static struct ggml_backend_reg registry = {
    .iface = {.get_name         = reg_name,
              .get_device_count = reg_device_count,
              .get_device       = reg_device,
              .get_proc_address = reg_proc_address},
};

struct ggml_backend_device llmaas_device = {
    .iface = {.get_name        = get_name,
              .get_description = get_description,
              .get_memory      = get_memory,
              .get_type        = get_type,
              .get_props       = get_props,
              .init_backend    = init_backend,
              .get_buffer_type = get_buffer_type,
              .supports_op     = supports_op,
              .supports_buft   = supports_buft},
    .reg = &registry,
};

/* Call these three with the lock held. */

static void add_device(void) {
    const ggml_backend_reg_t cpu = ggml_backend_cpu_reg();
    if (!cpu_proc_address) {
        cpu_proc_address = cpu->iface.get_proc_address;
        __atomic_store_n(&cpu->iface.get_proc_address, get_cpu_proc_address, __ATOMIC_SEQ_CST);
    }
    registry.api_version = cpu->api_version;
    ggml_backend_register(&registry);
    is_registered = true;
}

/* Restore the function that tells us of thread pools, once nothing is registered and no engine needs it. */
static void restore_if_unused(void) {
    const ggml_backend_reg_t cpu = ggml_backend_cpu_reg();
    if (!is_registered && n_engines == 0 && cpu_proc_address && cpu->iface.get_proc_address == get_cpu_proc_address) {
        __atomic_store_n(&cpu->iface.get_proc_address, cpu_proc_address, __ATOMIC_SEQ_CST);
        cpu_proc_address = NULL;
    }
}

static void remove_device(void) {
    ggml_backend_unload(&registry);
    is_registered = false;
    restore_if_unused();
}

/* Take the lock around a fork, so that the child does not find it held by a thread that it does not have. The child
 * counts only its own calls, so it does not wait for such threads. */
static void hold(void) { pthread_mutex_lock(&lock); }
static void let_go(void) { pthread_mutex_unlock(&lock); }

static void start_anew(void) {
    n_calls = n_calls_here;
    pthread_cond_init(&idle, NULL);
    pthread_mutex_init(&lock, NULL);
}

/* -- the API ----------------------------------------------------------------------------------------------------- */

static const char *   refusal;
static pthread_once_t checked = PTHREAD_ONCE_INIT;

/* Return the problem of another accelerator: it would get the larger products before us, and no plugin would see
 * them. */
static const char * accelerator_problem(void) {
    static char problem[128];
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        const ggml_backend_dev_t other = ggml_backend_dev_get(i);
        if (other != &llmaas_device && ggml_backend_dev_type(other) == GGML_BACKEND_DEVICE_TYPE_ACCEL) {
            snprintf(problem, sizeof problem, "its device %s computes products before plugins see them",
                     ggml_backend_dev_name(other));
            return problem;
        }
    }
    return NULL;
}

static void check(void) {
    pthread_atfork(hold, let_go, start_anew);
    const char * (*const checks[])(void) = {llmaas_abi_problem, llmaas_buffers_problem, accelerator_problem};
    for (size_t i = 0; !refusal && i < sizeof checks / sizeof *checks; i++) {
        refusal = checks[i]();
    }
}

const char * llmaas_ggml_refusal(void) {
    pthread_once(&checked, check);
    return refusal;
}

void * llmaas_buffer_type(void) { return llmaas_buffers(); }

void llmaas_register(void) {
    pthread_mutex_lock(&lock);
    if (n_users++ == 0) {
        add_device();
    }
    pthread_mutex_unlock(&lock);
}

void llmaas_unregister(void) {
    pthread_mutex_lock(&lock);
    n_users--;
    while (n_users == 0 && n_calls > n_calls_here) {
        pthread_cond_wait(&idle, &lock);
    }
    if (n_users == 0 && is_registered) {
        remove_device();
    }
    pthread_mutex_unlock(&lock);
}

static void begin_call(void) {
    pthread_mutex_lock(&lock);
    n_calls++;
    pthread_mutex_unlock(&lock);
    n_calls_here++;
}

static void end_call(void) {
    n_calls_here--;
    pthread_mutex_lock(&lock);
    n_calls--;
    pthread_cond_broadcast(&idle);
    pthread_mutex_unlock(&lock);
}

void llmaas_load_begin(llmaas_weights * weights) {
    begin_call();
    llmaas_buffers_begin(weights);
}

void llmaas_load_end(const void * model) {
    llmaas_buffers_end(model);
    end_call();
}

void llmaas_create_begin(llmaas_weights * weights) {
    begin_call();
    creation.is_on   = true;
    creation.weights = weights;
    creation.made    = NULL;
}

llmaas_engine * llmaas_create_end(void) {
    creation.is_on = false;
    end_call();
    return creation.made;
}

bool llmaas_engine_in_creation(const llmaas_engine * engine) { return creation.is_on && creation.made == engine; }

void llmaas_engine_gone(const llmaas_engine * engine) {
    if (creation.made == engine) { /* its context could not be created after all */
        creation.made = NULL;
    }
    pthread_mutex_lock(&lock);
    n_engines--;
    restore_if_unused();
    pthread_mutex_unlock(&lock);
}

uint32_t llmaas_engine_count(void) {
    pthread_mutex_lock(&lock);
    const uint32_t n = n_engines;
    pthread_mutex_unlock(&lock);
    return n;
}

bool llmaas_backend_registered(void) {
    pthread_mutex_lock(&lock);
    const bool is = is_registered;
    pthread_mutex_unlock(&lock);
    return is;
}
