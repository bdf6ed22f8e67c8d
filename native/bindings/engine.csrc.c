#include <llmaas/engine.h>
