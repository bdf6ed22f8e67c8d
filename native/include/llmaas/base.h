/* Status codes and the export macro; every other header of the core includes this one. */
#ifndef LLMAAS_BASE_H
#define LLMAAS_BASE_H

#include <stddef.h>
#include <stdint.h>

#define LLMAAS_API __attribute__((visibility("default")))

typedef enum llmaas_status {
    LLMAAS_OK           = 0,
    LLMAAS_EINVAL       = 1, /* an argument is outside its documented range */
    LLMAAS_ECORRUPT     = 2, /* the bytes are not what a writer of this format produces */
    LLMAAS_ESPACE       = 3, /* the destination is too small, or memory ran out */
    LLMAAS_EIO          = 4, /* a system call failed, or the file ended early */
    LLMAAS_EBUDGET      = 5, /* the reservation would exceed the limit */
    LLMAAS_EUNSUPPORTED = 6, /* the value is not representable, or the CPU lacks the instructions */
    LLMAAS_ESTALE       = 7, /* the chunk is well-formed but has another key */
} llmaas_status;

/* Return a static string such as "LLMAAS_ECORRUPT"; never NULL. */
LLMAAS_API const char * llmaas_status_name(int status);

#endif
