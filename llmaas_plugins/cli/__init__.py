"""The command ``llmaas``, one file a sub-command."""
