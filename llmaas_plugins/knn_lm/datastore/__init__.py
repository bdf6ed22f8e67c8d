"""The selected datastore: its file, and the search for the nearest pairs."""
