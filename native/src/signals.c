#include "llmaas/signals.h"

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <unistd.h>

enum { N_SIGNALS = 65 };

static volatile sig_atomic_t exit_status;
static struct sigaction kept[N_SIGNALS];
static bool is_kept[N_SIGNALS];

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

llmaas_status llmaas_signal_keep(int number) {
    if (number < 1 || number >= N_SIGNALS || sigaction(number, NULL, &kept[number]) != 0) {
        return LLMAAS_EINVAL;
    }
    is_kept[number] = true;
    return LLMAAS_OK;
}

llmaas_status llmaas_signal_put_back(int number) {
    if (number < 1 || number >= N_SIGNALS || !is_kept[number]) {
        return LLMAAS_EINVAL;
    }
    return sigaction(number, &kept[number], NULL) == 0 ? LLMAAS_OK : LLMAAS_EINVAL;
}
