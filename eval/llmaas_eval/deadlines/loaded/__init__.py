"""Promises of latency under load: traces of six apps, served by ``llmaas serve`` in several ways."""
