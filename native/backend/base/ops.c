#include "base/ops.h"

#include <stdio.h>
#include <string.h>

uint8_t llmaas_ops[LLMAAS_MAX_OPS];

static enum ggml_op numbers[LLMAAS_N_OPS];

/* Return the largest operation number. ggml_op_name() reads past its table for a number that ggml does not have; GLU is
 * the last one that it has. */
static uint32_t last_number(void) {
    const struct ggml_init_params params = {.mem_size = 4 * ggml_tensor_overhead(), .no_alloc = true};
    struct ggml_context *         ctx    = ggml_init(params);
    const uint32_t last = ctx ? (uint32_t) ggml_swiglu(ctx, ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 8))->op : LLMAAS_MAX_OPS;
    ggml_free(ctx);
    return last;
}

#define NAME(name) #name,
static const char * const names[] = {"", LLMAAS_OPS(NAME)}; /* by our number */
#undef NAME

static enum llmaas_op named(const char * name) {
    enum llmaas_op op = LLMAAS_N_OPS;
    while (--op > LLMAAS_OP_OTHER && strcmp(names[op], name) != 0) {
    }
    return op;
}

const char * llmaas_ops_problem(void) {
    static char    problem[64];
    const uint32_t last                = last_number();
    bool           found[LLMAAS_N_OPS] = {[LLMAAS_OP_OTHER] = true};
    for (uint32_t number = 0; number <= last && last < LLMAAS_MAX_OPS; number++) {
        const enum llmaas_op op = named(ggml_op_name((enum ggml_op) number));
        found[op]               = true;
        numbers[op]             = (enum ggml_op) number;
        llmaas_ops[number]      = (uint8_t) op;
    }
    for (int op = 0; op < LLMAAS_N_OPS; op++) {
        if (!found[op]) {
            snprintf(problem, sizeof problem, "it has no operation %s", names[op]);
            return problem;
        }
    }
    return NULL;
}

enum ggml_op llmaas_op_number(enum llmaas_op op) { return numbers[op]; }
