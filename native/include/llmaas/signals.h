/* Signals that end the process even while the interpreter, whose own handlers no longer run, is finalized. */
#ifndef LLMAAS_SIGNALS_H
#define LLMAAS_SIGNALS_H

#include "llmaas/base.h"

/* Make the signal end the process at once with this exit status. EINVAL, with no change, if it cannot be handled. One
   status serves all signals: the last one given. */
LLMAAS_API llmaas_status llmaas_signal_exit(int number, int status);

#endif
