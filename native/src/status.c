#include "llmaas/base.h"

const char * llmaas_status_name(int status) {
    switch (status) {
        case LLMAAS_OK:           return "LLMAAS_OK";
        case LLMAAS_EINVAL:       return "LLMAAS_EINVAL";
        case LLMAAS_ECORRUPT:     return "LLMAAS_ECORRUPT";
        case LLMAAS_ESPACE:       return "LLMAAS_ESPACE";
        case LLMAAS_EIO:          return "LLMAAS_EIO";
        case LLMAAS_EBUDGET:      return "LLMAAS_EBUDGET";
        case LLMAAS_EUNSUPPORTED: return "LLMAAS_EUNSUPPORTED";
        case LLMAAS_ESTALE:       return "LLMAAS_ESTALE";
        default:                  return "LLMAAS_UNKNOWN";
    }
}
