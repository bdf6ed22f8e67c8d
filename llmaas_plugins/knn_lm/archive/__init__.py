"""The full datastore on disk: every pair of every conversation."""
