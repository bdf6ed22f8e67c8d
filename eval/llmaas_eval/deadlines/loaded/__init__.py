"""Promises of latency under load: traces of six apps, which several systems serve."""
