llmaas_status llmaas_signal_exit(int number, int status);
