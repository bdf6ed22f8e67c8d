/* Linked into every program that uses the backend. Like a process that loads the library, each program first compares
 * the declarations of the two sides, which also looks up the operations. */
#include "base/abi.h"
#include "check.h"

__attribute__((constructor)) static void compare(void) {
    const char * problem = llmaas_abi_problem();
    if (problem) {
        fprintf(stderr, "this ggml is not one we know: %s\n", problem);
    }
    CHECK(!problem);
}
