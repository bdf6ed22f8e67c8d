llmaas_status llmaas_signal_exit(int number, int status);
llmaas_status llmaas_signal_keep(int number);
llmaas_status llmaas_signal_put_back(int number);
