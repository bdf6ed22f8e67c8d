/* Everything the core exports. */
#ifndef LLMAAS_H
#define LLMAAS_H

#include "llmaas/base.h"
#include "llmaas/budget.h"
#include "llmaas/chunk.h"
#include "llmaas/io.h"
#include "llmaas/kernels.h"
#include "llmaas/knn.h"
#include "llmaas/kv.h"
#include "llmaas/signals.h"
#include "llmaas/store.h"

#endif
