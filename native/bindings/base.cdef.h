typedef enum llmaas_status {
    LLMAAS_OK,
    LLMAAS_EINVAL,
    LLMAAS_ECORRUPT,
    LLMAAS_ESPACE,
    LLMAAS_EIO,
    LLMAAS_EBUDGET,
    LLMAAS_EUNSUPPORTED,
    LLMAAS_ESTALE,
    ...
} llmaas_status;

const char * llmaas_status_name(int status);
