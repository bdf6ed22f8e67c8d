"""Tables of the benchmarks of contexts: codec, restore, quality, inference and pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmaas_eval.benchmarks import benches, figures
from llmaas_eval.tables import (
    Maker,
    NoRowsError,
    Output,
    Table,
    between,
    bold,
    number,
    parse_interval,
    percent,
)

__all__ = ["TABLES"]

_Figures = Mapping[str, Any]

_CODECS = {f"planes{bits}": f"{bits} bits" for bits in (8, 6, 5, 4, 3, 2)}
_CODECS |= {"int8": "int8", "lossless": "lossless"}
_SPEEDS = {
    "decode: AVX-512": ("decode", "avx512", False),
    "transposed": ("decode", "avx512", True),
    "AVX2": ("decode", "avx2", False),
    "portable C": ("decode", "generic", False),
    "encode: AVX-512": ("encode", "avx512", False),
    "AVX2 ": ("encode", "avx2", False),
}
"""Function, kernels, and whether V is transposed."""

_TIERS: Mapping[str, tuple[Any, ...]] = {
    "RAM tier; vanilla: page cache": ("from_ram", "vanilla_restore"),
    "RAM tier; `LlamaRAMCache`": ("from_ram", "cache_restore"),
    "disk; vanilla: page cache": ("from_disk_warm",),
    "disk, cold": ("from_disk_cold",),
    "1000 MB/s, cold": ("from_slower_disk", 1000),
    "300 MB/s, cold": ("from_slower_disk", 300),
    "100 MB/s, cold": ("from_slower_disk", 100),
}
"""End of the function's name, and its parameter beside the codec."""
_KEPT = ("tolerance", "int8", "lossless")
_PARAMETERS = {"from_ram": ("vanilla",), "from_slower_disk": ("mb_per_s",)}

_MODELS = {"model_1b": "1 B", "model_200m": "200 M", "reference_model": "7 M (packaged)"}


def _codecs(outputs: Sequence[Output]) -> Table:
    """Show GB/s of f16 by codec and kernels, and the stored share."""
    names = ("kernels", "geometry", "codec")
    found = {
        (name, *key): info
        for name in ("decode", "encode")
        for key, info in figures(outputs, f"bench_codec::bench_{name}", *names).items()
    }
    lines = []
    for codec, label in _CODECS.items():
        infos = [found.get((*way, codec)) for way in _SPEEDS.values()]
        shares = [key for key in found if key[0] == "decode" and key[-1] == codec]
        if shares:
            share = found[shares[0]]["share"]
            lines.append([label, f"{share:.3f}", *map(_speed, infos)])
    heads = ["", "share of f16", *map(str.strip, _SPEEDS)]
    return Table(heads, lines, "l".ljust(len(heads), "r"))


def _speed(info: _Figures | None) -> str:
    if info is None:
        return ""
    speed = info["gb_per_s"]
    return f"{speed:.{1 if speed >= 1 else 2}f}"


def _restores(outputs: Sequence[Output]) -> Table:
    """Show milliseconds of restores and their speed over vanilla's."""
    lines = []
    for label, (name, *value) in _TIERS.items():
        try:
            names = ("stored", *_PARAMETERS.get(name, ()))
            found = figures(outputs, f"bench_restore::bench_restore_{name}", *names)
        except NoRowsError:
            continue
        infos = [found.get((codec, *value)) for codec in _KEPT]
        if any(infos):
            lines.append([label, _vanilla(infos), *_restored(infos)])
    if not lines:
        raise NoRowsError("found no run of bench_restore")
    heads = ["from", "vanilla", *(cell for codec in _KEPT for cell in (codec, ""))]
    return Table(heads, lines, "l".ljust(len(heads), "r"))


def _vanilla(infos: Sequence[_Figures | None]) -> str:
    """Return the range of vanilla's medians."""
    found = sorted(parse_interval(info["vanilla_ms"])[0] for info in infos if info)
    low, high = (f"{ms:.{1 if ms < 10 else 0}f}" for ms in (found[0], found[-1]))
    return low if low == high else f"{low}–{high}"


def _restored(infos: Sequence[_Figures | None]) -> list[str]:
    digits = 1 if any(info["speedup"] >= 10 for info in infos if info) else 2
    cells = []
    for i, info in enumerate(infos):
        if info is None:
            cells += ["", ""]
            continue
        ms = parse_interval(info["ours_ms"])[0]
        text = f"{ms:.{1 if ms < 50 else 0}f}"
        is_best = i == 0 and info["speedup"] > 1
        cells += [bold(text) if is_best else text, between(_speedup(info), digits)]
    return cells


def _quality(outputs: Sequence[Output]) -> Table:
    """Show the drift of predictions after contexts were stored."""
    lines = []
    for bench in benches(outputs, "bench_quality::bench_drift"):
        info, kl = bench.info, f"{bench.info['kl']:.2e}".replace("e-0", "e-")
        ratio = f"× {info['perplexity_ratio']:.4g}"
        top1 = percent(info["top1"], 1)
        lines.append([bench.params["codec"], str(bench.params["n_swaps"]), ratio, kl, top1])
    return Table(["codec", "swaps", "perplexity", "mean KL", "same top-1"], sorted(lines), "lrrrr")


def _inference(outputs: Sequence[Output]) -> Table:
    """Show an app's speed over vanilla's, and both apps' speed and memory."""
    found = figures(outputs, "bench_inference::bench_app", "model")
    lines = []
    for model, label in _MODELS.items():
        if info := found.get((model,)):
            parts = [
                between((info[f"{part}_speed"], info[f"{part}_low"], info[f"{part}_high"]), 3)
                for part in ("prefill", "decode", "chat")
            ]
            sides = ("ours", "vanilla")
            speeds = " \\| ".join(
                number(parse_interval(info[f"{side}_decode"])[0]) for side in sides
            )
            peaks = " \\| ".join(f"{info[f'{side}_peak_mib']:.0f}" for side in sides)
            lines.append([label, *parts, speeds, peaks])
    heads = ["model", "prompt", "tokens", "conversations", "tokens/s, ours \\| vanilla"]
    return Table([*heads, "peak MiB, ours \\| vanilla"], lines, "lrrrrr")


def _plans(outputs: Sequence[Output]) -> Table:
    """Show milliseconds of loads on the 200 M shape that compute some chunks, and read others."""
    found = figures(outputs, "bench_pipeline::bench_plan", "prompt", "mb_per_s")
    lines: list[list[str]] = []
    for (model, mb_per_s), info in found.items():
        if model == "model_200m":
            speedup, low, high = _speedup(info)
            unit = "" if lines else " tokens"
            best = f"{parse_interval(info['best_ms'])[0]:.0f} ({info['best_computes']}{unit})"
            plan = f"{parse_interval(info['ours_ms'])[0]:.0f} ({info['plan_computes']})"
            over_best = between((1 / speedup, 1 / high, 1 / low), 2)
            alone = [f"{info[f'{part}_alone_ms']:.0f}" for part in ("read", "compute")]
            promised = f"{info['predicted_ms']:.0f}" if "predicted_ms" in info else ""
            lines.append([f"{mb_per_s} MB/s", *alone, best, plan, over_best, promised])
    if not lines:
        raise NoRowsError("found no run of bench_plan on the 200 M shape")
    heads = ["disk", "all read", "all computed", "best cut", "the plan", "plan over best"]
    return Table([*heads, "promised"], lines, "lrrrrrr")


def _speedup(info: _Figures) -> tuple[float, float, float]:
    return info["speedup"], info["speedup_low"], info["speedup_high"]


TABLES: Mapping[str, Maker] = {
    "codecs": _codecs,
    "restore": _restores,
    "quality": _quality,
    "inference": _inference,
    "recompute": _plans,
}
