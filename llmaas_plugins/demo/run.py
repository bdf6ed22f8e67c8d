"""Run the demo: make every call of the trace on every system in turn."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from llmaas_hooks import ConfigError
from llmaas_plugins.demo.scenario import Script, ScriptedCall, make_trace, scripts_from
from llmaas_plugins.demo.worker import CallResult, Usage, WorkerSpec, serve_worker
from llmaas_plugins.model.loading import vocabulary
from llmaas_plugins.worker_process import WorkerProcess, worker_process

__all__ = [
    "OURS",
    "DemoOptions",
    "DemoRun",
    "kv_bytes_per_token",
    "own_folder",
    "ram_budget",
    "run_demo",
    "worker_spec",
]

OURS = "llmaas"
_SYSTEMS = ("recompute", "state files", "LlamaDiskCache", OURS)
_THEN = "Try fewer --contexts or a smaller --n-ctx."


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the demo.

    Attributes:
        model: Path of the GGUF file.
        data: Chat export that provides the user's turns; None for the packaged conversations.
        n_contexts: Most contexts.
        n_calls: Most calls; None for every turn.
        n_new: Most tokens of a reply.
        n_ctx: Context length of every engine; 0 for the model's own.
        budget_share: RAM for stored contexts, as a share of all contexts' KV cache.
        codec: Codec of kv_chunks.
        seed: Random seed of the trace.
        threads: CPU threads of every engine; None for llama.cpp's default.
    """

    model: Path
    data: Path | None = None
    n_contexts: int = 12
    n_calls: int | None = None
    n_new: int = 24
    n_ctx: int = 1024
    budget_share: float = 0.25
    codec: str = "tolerance"
    seed: int = 0
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class DemoRun:
    """Measurements of a demo run.

    Attributes:
        options: Options of the run.
        scripts: Script of each context.
        trace: Calls that were made.
        ram_budget_bytes: RAM that each system could use for stored contexts, page cache included.
        results: Results of each system, in the order of ``trace``.
        usage: Memory and disk use of each system.
    """

    options: DemoOptions
    scripts: Sequence[Script]
    trace: Sequence[ScriptedCall]
    ram_budget_bytes: int
    results: dict[str, list[CallResult]]
    usage: dict[str, Usage]


def run_demo(options: DemoOptions) -> DemoRun:
    """Run the trace on all systems, call by call; the systems take turns in going first.

    Raises:
        ConfigError: The data cannot be used.
        LlmaasError: A worker failed or died.
    """
    scripts = scripts_from(options.data, options.n_contexts)
    trace = make_trace(scripts, options.n_calls, options.seed)
    budget = ram_budget(options, scripts)
    results: dict[str, list[CallResult]] = {name: [] for name in _SYSTEMS}
    made: list[ScriptedCall] = []
    full: set[int] = set()
    with ExitStack() as stack:
        folder = stack.enter_context(own_folder())
        specs = [worker_spec(name, options, scripts, folder, budget) for name in _SYSTEMS]
        workers = {
            spec.system: stack.enter_context(
                worker_process(f"system {spec.system!r}", serve_worker, spec, _THEN)
            )
            for spec in specs
        }
        for worker in workers.values():
            worker.receive()
        for i, call in enumerate(tqdm(trace, desc="calls", unit="call", disable=None)):
            if call.context in full:
                continue
            row = _call_all(workers, call, first=i % len(_SYSTEMS))
            if row is None:
                full.add(call.context)
                continue
            made.append(call)
            for name, result in row.items():
                results[name].append(result)
        usage = {name: worker.ask(None) for name, worker in workers.items()}
    if all(result.switch_s is None for result in results[OURS]):
        raise ConfigError(
            f"no context was switched in {len(made)} calls, so there is nothing to compare. "
            "Allow more calls or longer contexts (--calls, --n-ctx)."
        )
    return DemoRun(options, scripts, made, budget, results, usage)


@contextmanager
def own_folder() -> Iterator[Path]:
    """Make a folder for the systems' files in ``/var/tmp``, as ``/tmp`` is often in RAM."""
    parent = "/var/tmp" if os.access("/var/tmp", os.W_OK) else None  # noqa: S108
    with tempfile.TemporaryDirectory(prefix=f"llmaas-demo-{os.getpid()}-", dir=parent) as name:
        yield Path(name)


def _call_all(
    workers: Mapping[str, WorkerProcess], call: ScriptedCall, first: int
) -> dict[str, CallResult] | None:
    """Make a call on each system, from system ``first`` on; return None if the context is full."""
    row: dict[str, CallResult] = {}
    for name in (*_SYSTEMS[first:], *_SYSTEMS[:first]):
        result = workers[name].ask((call.context, call.turn))
        if not isinstance(result, CallResult):
            return None
        row[name] = result
    return row


def ram_budget(options: DemoOptions, scripts: Sequence[Script]) -> int:
    """Return the bytes of ``budget_share`` of all contexts' f16 KV cache at their final length."""
    with vocabulary(options.model) as vocab:
        lengths = [
            sum(len(vocab.tokenize(turn.encode())) + options.n_new for turn in script.turns)
            for script in scripts
        ]
        metadata = vocab.metadata
    arch = metadata.get("general.architecture", "llama")
    n_ctx = options.n_ctx or int(metadata.get(f"{arch}.context_length", 1024))
    n_tokens = sum(min(length, n_ctx) for length in lengths)
    least = 1 << 20
    return max(least, int(n_tokens * kv_bytes_per_token(metadata) * options.budget_share))


def kv_bytes_per_token(metadata: dict[str, str]) -> int:
    """Return the f16 bytes of K and V per token over all layers, from the GGUF metadata."""
    arch = metadata["general.architecture"]

    def number(key: str, default: int = 0) -> int:
        return int(metadata.get(f"{arch}.{key}", default))

    n_head = number("attention.head_count", 1)
    n_head_kv = number("attention.head_count_kv", n_head)
    head_dim = number("attention.key_length", number("embedding_length") // n_head)
    return number("block_count") * n_head_kv * head_dim * 2 * 2


def worker_spec(
    name: str, options: DemoOptions, scripts: Sequence[Script], folder: Path, budget: int
) -> WorkerSpec:
    """Return a system's settings, and make the folder for its files in ``folder``."""
    own = folder / name.replace(" ", "-")
    own.mkdir()
    llama: dict[str, Any] = {"n_ctx": options.n_ctx, "flash_attn": True}
    if options.threads is not None:
        llama |= {"n_threads": options.threads, "n_threads_batch": options.threads}
    table = {"codec": options.codec, "ram_budget": budget, "store": str(own / "kv")}
    suite = {"on_error": "raise", "plugins": {"kv_chunks": table}} if name == OURS else None
    return WorkerSpec(name, options.model, llama, own, suite, tuple(scripts), options.n_new, budget)
