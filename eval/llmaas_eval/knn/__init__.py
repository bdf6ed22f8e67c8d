"""Quality of next-token mixing with a selected datastore (KDD'24 §5, appendix B)."""
