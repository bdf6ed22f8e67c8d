#include "llmaas/signals.h"

#include <signal.h>
#include <stddef.h>
#include <unistd.h>

static volatile sig_atomic_t exit_status;

static void leave(int number) {
    (void) number;
    _exit(exit_status);
}

llmaas_status llmaas_signal_exit(int number, int status) {
    struct sigaction action = { .sa_handler = leave };
    sigfillset(&action.sa_mask);
    exit_status = status;
    return sigaction(number, &action, NULL) == 0 ? LLMAAS_OK : LLMAAS_EINVAL;
}
