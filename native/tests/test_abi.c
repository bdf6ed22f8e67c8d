/* Releases of ggml that are not installed: a buffer type of version 3 of the backend interface, and releases that we do
 * not know. The functions here replace ggml's. */
#include "base/abi.h"
#include "check.h"
#include "engine/buffer.h"

#include <dlfcn.h>

enum { ALLOC_BUFFER = 1, GET_ALIGNMENT_2 = 2, GET_ALIGNMENT_3 = 3, IS_HOST_2 = 5, DEVICE_2 = 6, IS_HOST_3 = 7, DEVICE_3 = 8, N_SLOTS_3 = 10 };

/* -- a ggml of version 3 ------------------------------------------------------------------------------------------- */

typedef void * slots[N_SLOTS_3];

static slots        cpu_type; /* in the test's memory, so that the sanitizers see reads beyond it */
static const char * hidden;   /* the operation that this ggml lacks */
static int          layout = 2; /* of buffer types */

static void * next(const char * name) {
    void * function = dlsym(RTLD_NEXT, name);
    CHECK(function);
    return function;
}

static ggml_backend_buffer_type_t real_type(void) {
    ggml_backend_buffer_type_t (*type)(void);
    *(void **) &type = next("ggml_backend_cpu_buffer_type");
    return type();
}

ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type(void) {
    return layout == 3 ? (ggml_backend_buffer_type_t) cpu_type : real_type();
}

static void * slot(ggml_backend_buffer_type_t type, int in_2, int in_3) { return ((void **) type)[layout == 2 ? in_2 : in_3]; }

ggml_backend_dev_t ggml_backend_buft_get_device(ggml_backend_buffer_type_t type) {
    return slot(type, DEVICE_2, DEVICE_3);
}

bool ggml_backend_buft_is_host(ggml_backend_buffer_type_t type) {
    bool (*is_host)(ggml_backend_buffer_type_t);
    *(void **) &is_host = slot(type, IS_HOST_2, IS_HOST_3);
    return is_host(type);
}

ggml_backend_buffer_t ggml_backend_buft_alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t);
    *(void **) &alloc_buffer = slot(type, ALLOC_BUFFER, ALLOC_BUFFER);
    return alloc_buffer(type, size);
}

size_t ggml_backend_buft_get_alignment(ggml_backend_buffer_type_t type) {
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    *(void **) &get_alignment = slot(type, GET_ALIGNMENT_2, GET_ALIGNMENT_3);
    return get_alignment(type);
}

const char * ggml_op_name(enum ggml_op op) {
    const char * (*name)(enum ggml_op);
    *(void **) &name = next("ggml_op_name");
    return hidden && strcmp(name(op), hidden) == 0 ? "ELSE" : name(op);
}

/* Use the CPU's buffer type in version 3: two more slots. */
static void become_layout_3(void) {
    void * const * real = (void * const *) real_type();
    memcpy(cpu_type, real, 2 * sizeof *cpu_type);
    memcpy(cpu_type + GET_ALIGNMENT_3, real + GET_ALIGNMENT_2, 3 * sizeof *cpu_type);
    memcpy(cpu_type + IS_HOST_3, real + IS_HOST_2, 3 * sizeof *cpu_type);
    layout = 3;
}

static void become(int version) {
    layout                              = 2;
    ggml_backend_cpu_reg()->api_version = version;
    if (version == 3) {
        become_layout_3();
    }
}

/* -- the checks ---------------------------------------------------------------------------------------------------- */

static const char * found_problem(void) {
    const char * problem = llmaas_abi_problem();
    return problem ? problem : llmaas_buffers_problem();
}

static void check_allocation(void) {
    const ggml_backend_buffer_type_t type = llmaas_buffers();
    CHECK(ggml_backend_buft_get_device(type) == &llmaas_device);
    CHECK(!ggml_backend_buft_is_host(type));
    CHECK(ggml_backend_buft_get_alignment(type) == 64);
    const ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(type, 4096);
    CHECK(buffer && ggml_backend_buffer_get_type(buffer) == type && ggml_backend_buffer_get_size(buffer) == 4096);
    memset(ggml_backend_buffer_get_base(buffer), 1, 4096);
    ggml_backend_buffer_free(buffer);
}

static void check_version_3_differs_in_buffer_types_only(void) {
    become(3);
    CHECK(!found_problem());
    void * const * ours = (void * const *) llmaas_buffers();
    CHECK(ours[0] && ours[1] && !ours[2] && ours[3] && !ours[4] && !ours[5] && !ours[6] && ours[7]);
    CHECK(ours[8] == &llmaas_device && !ours[9]);
    check_allocation();
    become(2);
    CHECK(!found_problem());
    CHECK(llmaas_buffers() != (ggml_backend_buffer_type_t) ours);
    check_allocation();
}

static void check_refused(const char * expected) {
    const char * problem = found_problem();
    CHECK(problem && strcmp(problem, expected) == 0);
}

/* Check a ggml whose buffer types do not match the version that it reports: nothing must be called that is not a
 * function. */
static void check_false_version_is_refused(void) {
    become(3);
    layout = 2;
    check_refused("the buffer type's interface has another layout");
    become(2);
    become_layout_3();
    check_refused("the buffer type's interface has another layout");
    become(2);
}

static void check_unknown_is_refused(void) {
    ggml_backend_cpu_reg()->api_version = 4;
    check_refused("its backend interface has version 4, expected 2 or 3");
    ggml_backend_cpu_reg()->api_version = 1;
    check_refused("its backend interface has version 1, expected 2 or 3");
    become(2);
    hidden = "SET_ROWS";
    check_refused("it has no operation SET_ROWS");
    hidden = "GLU"; /* the last one: nothing beyond it is read */
    check_refused("it has no operation GLU");
    hidden = NULL;
    CHECK(!found_problem());
}

int main(void) {
    check_version_3_differs_in_buffer_types_only();
    check_false_version_is_refused();
    check_unknown_is_refused();
    return 0;
}
