"""Promises of latency on an idle machine: which are kept, and how good the predictions are."""
