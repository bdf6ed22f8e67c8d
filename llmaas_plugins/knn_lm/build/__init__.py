"""From conversations to the archive and the selected datastore."""
