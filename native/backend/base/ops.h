/* ggml's operations, by name. Their numbers change between releases; their names do not. Nothing here uses a number
 * from compile time, so one build serves every release that check_versions() in abi.c admits. */
#ifndef LLMAAS_OPS_H
#define LLMAAS_OPS_H

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <stdbool.h>
#include <stdint.h>

#define LLMAAS_OPS(X)                                                                                                    \
    X(NONE) X(ADD) X(MUL) X(RMS_NORM) X(MUL_MAT) X(MUL_MAT_ID) X(SCALE) X(CONT) X(RESHAPE) X(VIEW) X(PERMUTE) X(GET_ROWS) \
    X(SET_ROWS) X(SOFT_MAX) X(ROPE) X(FLASH_ATTN_EXT) X(UNARY) X(CUSTOM) X(GLU)

/* LLMAAS_OP_OTHER: any operation that is not in the list. */
#define LLMAAS_ENUM(name) LLMAAS_OP_##name,
enum llmaas_op { LLMAAS_OP_OTHER, LLMAAS_OPS(LLMAAS_ENUM) LLMAAS_N_OPS };
#undef LLMAAS_ENUM

/* From here on, using a compiled number is a compile error. */
#define LLMAAS_PRAGMA(text) _Pragma(#text)
#define LLMAAS_POISON(name) LLMAAS_PRAGMA(GCC poison GGML_OP_##name)
LLMAAS_OPS(LLMAAS_POISON)
#undef LLMAAS_POISON
#undef LLMAAS_PRAGMA

/* Look up the operation numbers of this process's ggml. Return one sentence that names what is missing, or NULL. Before
 * this call, made by llmaas_abi_problem(), every operation is LLMAAS_OP_OTHER. */
const char * llmaas_ops_problem(void);

#define LLMAAS_MAX_OPS 256
extern uint8_t llmaas_ops[LLMAAS_MAX_OPS]; /* by ggml's number */

static inline enum llmaas_op llmaas_op_of(const struct ggml_tensor * tensor) {
    return (uint32_t) tensor->op < LLMAAS_MAX_OPS ? (enum llmaas_op) llmaas_ops[tensor->op] : LLMAAS_OP_OTHER;
}

static inline bool llmaas_is_product(const struct ggml_tensor * tensor) {
    return llmaas_op_of(tensor) == LLMAAS_OP_MUL_MAT || llmaas_op_of(tensor) == LLMAAS_OP_MUL_MAT_ID;
}

/* Return ggml's number of an operation in the list. */
enum ggml_op llmaas_op_number(enum llmaas_op op);

#endif
