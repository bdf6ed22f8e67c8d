"""Requests sent at their times of arrival, whether or not earlier ones were answered (open loop).

The client measures: the time to the first token from the request's time of arrival, and the mean
time of each further token.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from llmaas_eval.deadlines.loaded.service import KEYS, Service

__all__ = ["Answer", "Call", "Limits", "ask", "send"]

_TIMEOUT_S = 3600.0
_WAIT_S = 0.05
_BIAS = 100.0
"""Logit bias of the word that all answers consist of, so that they have equal lengths."""
_DATA, _DONE = b"data: ", b"[DONE]"


class Limits(NamedTuple):
    """Promise of a request in ms."""

    ttft_ms: float
    tpot_ms: float


class Call(NamedTuple):
    """A request as a system gets it.

    Attributes:
        number: Place in the trace.
        app: Name of the app.
        prompt: Text.
        n_answer: Tokens of the answer.
        word: Token that the answer repeats.
        limits: Limits to judge by.
        names_promise: Whether the request names its limits.
        levels: Levels of prompt and answer that the request asks for; None for none.
        at_s: Time of arrival in seconds.
        share: Share of the prompt that the request asks to read; None for none.
    """

    number: int
    app: str
    prompt: str
    n_answer: int
    word: int
    limits: Limits
    names_promise: bool
    levels: tuple[float, float] | None
    at_s: float = 0.0
    share: float | None = None


class Answer(NamedTuple):
    """Measured answer to a call.

    Attributes:
        number: Place in the trace.
        ttft_ms: Time from the arrival to the first token; None if there was none.
        tpot_ms: Mean time of each further token; None if there was none.
        n_tokens: Number of tokens.
        error: Reason why the answer is incomplete; None if it is complete.
    """

    number: int
    ttft_ms: float | None
    tpot_ms: float | None
    n_tokens: int
    error: str | None

    def met(self, limits: Limits) -> tuple[bool, bool]:
        """Return whether both limits were met. An incomplete answer meets neither."""
        if self.error is not None or self.ttft_ms is None or self.tpot_ms is None:
            return False, False
        return self.ttft_ms <= limits.ttft_ms, self.tpot_ms <= limits.tpot_ms


def ask(service: Service, call: Call, start: float | None = None) -> Answer:
    """Send a call and measure its answer.

    Args:
        service: Service to ask.
        call: Call.
        start: Value of ``time.perf_counter`` from which ``at_s`` counts; None for now.
    """
    came = time.perf_counter() if start is None else start + call.at_s
    times: list[float] = []
    try:
        times.extend(time.perf_counter() for _ in _tokens(service, call))
        error = None if len(times) == call.n_answer else f"{len(times)} of {call.n_answer} tokens"
    except (OSError, http.client.HTTPException, LookupError, ValueError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    ttft_ms = 1000 * (times[0] - came) if times else None
    n_others = len(times) - 1
    tpot_ms = 1000 * (times[-1] - times[0]) / n_others if n_others > 0 else None
    return Answer(call.number, ttft_ms, tpot_ms, len(times), error)


def send(
    service: Service,
    calls: Sequence[Call],
    most_missed: int | None = None,
    progress: Callable[[], object] = lambda: None,
) -> list[Answer] | None:
    """Send calls at their times; return the answers in the calls' order.

    Args:
        service: Service to ask.
        calls: Calls in the order of their arrival.
        most_missed: Calls that may miss a limit before sending ends early; None for all.
        progress: Called after each answer.

    Returns:
        The answers, or None if sending ended early. The service is stopped then.
    """
    start = time.perf_counter()
    state = _State(start, most_missed)
    with ThreadPoolExecutor(len(calls)) as pool:

        def work(call: Call) -> Answer:
            is_met = False
            try:
                answer = ask(service, call, start)
                is_met = all(answer.met(call.limits))
            finally:
                state.end(call, is_met=is_met)
            progress()
            return answer

        try:
            futures = []
            for call in calls:
                if not state.wait_until(start + call.at_s):
                    break
                state.begin(call)
                futures.append(pool.submit(work, call))
            is_over = not state.wait_for_all()
        except BaseException:
            service.stop()  # so that threads that wait for an answer end
            raise
        if is_over:
            service.stop()
            return None
        return [future.result() for future in futures]


# -- inside --------------------------------------------------------------------------------------


class _State:
    """Calls that were sent, and misses so far, which may end the sending."""

    def __init__(self, start: float, most_missed: int | None) -> None:
        self._start, self._most = start, most_missed
        self._n_missed = 0
        self._due: dict[int, float] = {}
        self._lock = threading.Lock()

    def begin(self, call: Call) -> None:
        """Count a call as missed from when its answer, kept to both limits, would be complete."""
        ttft_ms, tpot_ms = call.limits
        with self._lock:
            self._due[call.number] = (
                self._start + call.at_s + (ttft_ms + (call.n_answer - 1) * tpot_ms) / 1000
            )

    def end(self, call: Call, *, is_met: bool) -> None:
        """Count an answer."""
        with self._lock:
            del self._due[call.number]
            self._n_missed += not is_met

    def wait_until(self, moment: float) -> bool:
        """Wait until a moment; return False as soon as too many calls missed."""
        while not self._has_too_many():
            left_s = moment - time.perf_counter()
            if left_s <= 0:
                return True
            time.sleep(min(left_s, _WAIT_S))
        return False

    def wait_for_all(self) -> bool:
        """Wait until all calls are answered; return False as soon as too many missed."""
        while not self._has_too_many():
            with self._lock:
                if not self._due:
                    return True
            time.sleep(_WAIT_S)
        return False

    def _has_too_many(self) -> bool:
        if self._most is None:
            return False
        now = time.perf_counter()
        with self._lock:
            late = sum(now > due for due in self._due.values())
            return self._n_missed + late > self._most


def _tokens(service: Service, call: Call) -> Any:
    """Yield the tokens' texts as they arrive.

    Raises:
        OSError: The connection failed.
        HTTPException: The server ended the answer.
        ValueError: The server refused the call.
    """
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", _body(call), _headers(call))
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise ValueError(f"status {response.status}: {response.read()[:500]!r}")
        for line in response:
            if line.startswith(_DATA) and not line.startswith(_DATA + _DONE):
                piece = json.loads(line[len(_DATA) :])
                if "error" in piece:
                    raise ValueError(str(piece["error"]))
                if piece["choices"][0]["text"]:
                    yield piece["choices"][0]["text"]


def _headers(call: Call) -> dict[str, str]:
    found = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[call.app]}"}
    if call.names_promise:
        ttft_ms, tpot_ms = call.limits
        found["X-LLMaaS-SLO"] = f"{ttft_ms:.3f} ms/{tpot_ms:.3f} ms"
    return found


def _body(call: Call) -> bytes:
    body: dict[str, Any] = {
        "prompt": call.prompt,
        "max_tokens": call.n_answer,
        "temperature": 0.0,
        "stream": True,
        "logit_bias": {str(call.word): _BIAS},
    }
    if call.levels is not None:
        body["level"] = dict(zip(("prefill", "decode"), call.levels, strict=True))
    if call.share is not None:
        body["prompt_share"] = call.share
    return json.dumps(body).encode()
