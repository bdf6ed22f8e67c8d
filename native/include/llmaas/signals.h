/* Actions of signals that Python's module does not give: to end the process even while the interpreter, whose own handlers
   no longer run, is finalized; and to keep all that an app has set for a signal. */
#ifndef LLMAAS_SIGNALS_H
#define LLMAAS_SIGNALS_H

#include "llmaas/base.h"

/* Make the signal end the process at once with this exit status. EINVAL, with no change, if it cannot be handled. One
   status serves all signals: the last one given. */
LLMAAS_API llmaas_status llmaas_signal_exit(int number, int status);

/* Keep the action of a signal, its flags included. EINVAL for a number that is no signal's. */
LLMAAS_API llmaas_status llmaas_signal_keep(int number);

/* Set the action that was kept last for a signal. EINVAL if there is none. */
LLMAAS_API llmaas_status llmaas_signal_put_back(int number);

#endif
