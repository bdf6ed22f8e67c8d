#include <llmaas/llmaas.h>
