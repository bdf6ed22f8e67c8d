"""Prometheus metrics of the service.

Labels are few and bounded: classes of routes and statuses, never apps or contexts. Plugins are
queried at each scrape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

from llmaas_hooks import RequestStats, hookimpl
from llmaas_plugins.server.admission import Admission
from llmaas_plugins.service.call_queue import Reply

__all__ = ["CONTENT_TYPE_LATEST", "Metrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Metrics of HTTP requests and of the engine's calls."""

    def __init__(self, admission: Admission) -> None:
        """Start all counters at zero."""
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "HTTP requests.", "route", "status")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._reused = self._counter("reused_tokens", "Tokens of prompts whose KV was reused.")
        self._generated = self._counter("generated_tokens", "Tokens generated.")
        self._decode = self._counter("decode_seconds", "Time of tokens after the first ones.")
        self._slides = self._counter("slides", "Calls that slid their context's window.")
        self._waited = self._histogram("queue_wait", "Time that a call waited for its turn.")
        self._switch = self._histogram("switch", "Time to bring a call's context into the engine.")
        self._first_token = self._histogram("first_token", "Time of a call to its first token.")
        self._gauge("queue_waiting_calls", "Calls that wait.", lambda: len(admission.waiting))
        self._gauge("queue_running_calls", "Calls that run.", lambda: admission.n_running)
        self._gauge(
            "interrupted_calls",
            "Calls that wait in the middle of their work.",
            lambda: len(admission.interrupted),
        )
        self._gauge(
            "interruptions", "Interruptions of calls so far.", lambda: admission.n_interruptions
        )
        self._gauge(
            "missed_in_queue",
            "Calls that left the queue after their time to the first token.",
            lambda: admission.n_missed,
        )
        ProcessCollector(registry=self._registry)

    def request(self, route: str, status: int) -> None:
        """Count a request that was answered."""
        self._requests.labels(route, str(status)).inc()

    def waited(self, seconds: float) -> None:
        """Record how long a call waited for its turn."""
        self._waited.observe(seconds)

    def replied(self, reply: Reply) -> None:
        """Count a completed call in a named context."""
        self._slides.inc(reply.n_left_out > 0)

    @hookimpl
    def llmaas_request_end(self, stats: RequestStats) -> None:
        """Count a request that the engine served."""
        self._prompt.inc(stats.n_prompt)
        self._reused.inc(stats.n_reused)
        self._generated.inc(stats.n_generated)
        self._decode.inc(max(0.0, stats.decode_s - stats.decode_away_s))
        self._switch.observe(stats.prepare_s)
        if stats.first_token_s is not None:
            self._first_token.observe(stats.first_token_s)

    def read_plugins(self, status: Callable[[], dict[str, Any]]) -> None:
        """Add every number in the plugins' reports, from ``Suite.status``."""
        self._registry.register(_Plugins(status))

    def read_cloud(self, counts: Mapping[str, int]) -> None:
        """Add the requests that the cloud may have answered, from ``Gateway.counts``."""
        self._registry.register(_Cloud(counts))

    def as_text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"llmaas_{name}", help_text, labels, registry=self._registry)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        name = f"llmaas_{name}_seconds"
        return Histogram(name, help_text, registry=self._registry, buckets=_SECONDS)

    def _gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        Gauge(f"llmaas_{name}", help_text, registry=self._registry).set_function(value)


class _Plugins(Collector):
    """Collector of ``llmaas_<plugin>_<entry>`` metrics, one for each number in a plugin's report.

    Numbers in a dictionary get their key as a label. A report does not say which numbers are
    counters, so the metrics have no type.
    """

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        return []  # otherwise registering would query the plugins

    def collect(self) -> Iterator[Metric]:
        for plugin, report in self._status()["plugins"].items():
            for entry, value in report.items():
                name = re.sub(r"_s$", "_seconds", f"llmaas_{plugin}_{entry}")
                name = re.sub(r"[^a-zA-Z0-9_]", "_", name)
                text = f"{entry} of {plugin}."
                if _is_number(value):
                    yield UnknownMetricFamily(name, text, value=value)
                if isinstance(value, dict) and any(map(_is_number, value.values())):
                    yield _by_key(UnknownMetricFamily(name, text, labels=["key"]), value)


class _Cloud(Collector):
    """Collector of ``llmaas_cloud_requests_total``, by outcome."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        text = "Requests that the cloud might answer, and answers of the cloud that were kept."
        family = CounterMetricFamily("llmaas_cloud_requests", text, labels=["outcome"])
        for outcome, n in self._counts.items():
            family.add_metric([outcome], n)
        yield family


def _by_key(family: UnknownMetricFamily, values: dict[str, Any]) -> Metric:
    for key, value in values.items():
        if _is_number(value):
            family.add_metric([str(key)], value)
    return family


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
