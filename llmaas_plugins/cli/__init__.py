"""The command ``llmaas``, one file for each sub-command."""
