"""Tables of the benchmarks: the committed ones come back from the figures that they show."""

from __future__ import annotations

import re

import pytest
from outputs import committed_rows, made

from llmaas_eval.benchmarks import benches
from llmaas_eval.stats import quartiles


def bench(name, info, **params):
    """Return a run as pytest-benchmark writes it."""
    file, _, function = name.partition("::")
    shown = "-".join(map(str, params.values()))
    return {
        "name": f"{function}[{shown}]" if params else function,
        "fullname": f"eval/bench/{file}.py::{function}[{shown}]",
        "params": params or None,
        "extra_info": info,
    }


def document(*runs, **record):
    return {"benchmarks": list(runs), **record}


def numbers(cell):
    """Return a cell's numbers."""
    return [float(each.replace(",", "")) for each in re.findall(r"\d[\d.,]*", cell)]


def three(cell):
    """Return a cell's median and limits as benchmarks record quartiles."""
    return "{} [{} {}]".format(*numbers(cell))


def median(value):
    return quartiles([value] * 3)


def inverse(ratio, low, high):
    return {"speedup": 1 / ratio, "speedup_low": 1 / high, "speedup_high": 1 / low}


def speedup(ratio, low, high):
    return {"speedup": ratio, "speedup_low": low, "speedup_high": high}


def test_codecs():
    ways = [("decode", "avx512", False), ("decode", "avx512", True), ("decode", "avx2", False)]
    ways += [("decode", "generic", False), ("encode", "avx512", False), ("encode", "avx2", False)]
    runs = []
    for label, share, *speeds in committed_rows("codecs"):
        codec = f"planes{label[0]}" if label.endswith("bits") else label
        for (name, kernels, geometry), speed in zip(ways, speeds, strict=True):
            info = {"gb_per_s": float(speed), "share": float(share)}
            params = {"kernels": kernels, "geometry": geometry, "codec": codec}
            runs.append(bench(f"bench_codec::bench_{name}", info, **params))
    assert made("codecs", document(*runs)) == committed_rows("codecs")
    few = [run for run in runs if run["params"]["codec"] == "int8"]
    few = [run for run in few if run["params"]["kernels"] != "avx512"]
    assert made("codecs", document(*few)) == [["int8", "0.516", "", "", "13.2", "0.26", "", "6.3"]]


def test_restores():
    places = [
        ("from_ram", {"vanilla": "vanilla_restore"}),
        ("from_ram", {"vanilla": "cache_restore"}),
    ]
    places += [("from_disk_warm", {}), ("from_disk_cold", {})]
    places += [("from_slower_disk", {"mb_per_s": n}) for n in (300, 100)]
    runs = []
    for (name, params), row in zip(places, committed_rows("restore"), strict=True):
        low, high = (numbers(row[1]) * 2)[0], numbers(row[1])[-1]
        vanilla = dict(zip(("tolerance", "int8", "lossless"), (low, high, high), strict=True))
        for codec, ms, ratio in zip(vanilla, row[2::2], row[3::2], strict=True):
            info = {"ours_ms": median(*numbers(ms)), "vanilla_ms": median(vanilla[codec])}
            info |= speedup(*numbers(ratio))
            runs.append(bench(f"bench_restore::bench_restore_{name}", info, stored=codec, **params))
    expected = committed_rows("restore")
    expected[4][3] = "2.70 (2.48–20.00)"  # all limits of a cell have as many digits
    assert made("restore", document(*runs)) == expected


def test_quality():
    runs = []
    for codec, n_swaps, ratio, kl, top1 in committed_rows("quality"):
        info = {"perplexity_ratio": numbers(ratio)[0], "kl": float(kl)}
        info["top1"] = numbers(top1)[0] / 100
        runs.append(bench("bench_quality::bench_drift", info, codec=codec, n_swaps=int(n_swaps)))
    assert made("quality", document(*runs[::-1])) == committed_rows("quality")


def test_inference():
    models, runs = ("model_1b", "model_200m", "reference_model"), []
    for model, row in zip(models, committed_rows("inference"), strict=True):
        info = {}
        for part, cell in zip(("prefill", "decode", "chat"), row[1:4], strict=True):
            ends = (f"{part}_speed", f"{part}_low", f"{part}_high")
            info |= dict(zip(ends, numbers(cell), strict=True))
        for side, speed, peak in zip(
            ("ours", "vanilla"), numbers(row[4]), numbers(row[5]), strict=True
        ):
            info |= {f"{side}_decode": median(speed), f"{side}_peak_mib": peak}
        runs.append(bench("bench_inference::bench_app", info, model=model))
    assert made("inference", document(*runs[::-1])) == committed_rows("inference")


def test_recompute():
    runs = [bench("bench_pipeline::bench_plan", {}, prompt="reference_model", mb_per_s=2)]
    for row in committed_rows("recompute"):
        cells = [numbers(cell) for cell in row]
        info = {"read_alone_ms": cells[1][0], "compute_alone_ms": cells[2][0]}
        info |= {"best_ms": median(cells[3][0]), "best_computes": int(cells[3][1])}
        info |= {"ours_ms": median(cells[4][0]), "plan_computes": int(cells[4][1])}
        info |= inverse(*cells[5]) | {"predicted_ms": cells[6][0]}
        params = {"prompt": "model_200m", "mb_per_s": int(cells[0][0])}
        runs.append(bench("bench_pipeline::bench_plan", info, **params))
    assert made("recompute", document(*runs)) == committed_rows("recompute")


def test_overhead_of_the_engine():
    pairs = [("200m", "prefill"), ("200m", "generate"), ("1b", "prefill"), ("1b", "generate")]
    through, states = committed_rows("engine-overhead")
    runs = []
    for (pair, what), one, other in zip(pairs, through[1:], states[1:], strict=True):
        params = {"pair": pair, "what": what}
        runs.append(bench("bench_engine::bench_pass_through", inverse(*numbers(one)), **params))
        *ratios, low, high = numbers(other)
        for kind, ratio in zip(("final_norm", "ffn_input"), ratios[::-1], strict=False):
            info = inverse(ratio, low, high)
            runs.append(bench("bench_engine::bench_hidden_states", info, states=kind, **params))
    assert made("engine-overhead", document(*runs)) == [through, states]


def engine_parts():
    """Return runs that have the figures of the committed table of parts."""
    keys = {"Q4_0": "q4_0", "Q4_K": "q4_k"}
    parts = {"all four": "all", "rows": "rows"}
    found, name = {}, ""
    for label, part, *cells in committed_rows("engine-parts"):
        name = label or name
        weights = next(key for title, key in keys.items() if title in name)
        key = (
            weights,
            "prefill" if "128" in name else "generate",
            "tiles" if "tiles" in name else None,
        )
        for ratio, cell in zip((0.25, 0.5, 0.75), cells, strict=True):
            title = parts.get(part, part.replace("`", ""))
            found.setdefault(key, {})[f"{title} {ratio}"] = "{} ({}–{})".format(*numbers(cell))
    return [
        bench("bench_engine::bench_parts", info, weights=weights, what=what, source=source)
        for (weights, what, source), info in found.items()
    ]


def test_parts_of_products():
    assert made("engine-parts", document(*engine_parts())) == committed_rows("engine-parts")


def test_columns_of_products():
    rows = made("engine-columns", document(*engine_parts()))
    assert rows[0][0] == committed_rows("engine-columns")[0][0]
    assert rows[0][1] == "0.368 \\| 0.619 \\| 0.868"
    assert rows[1] == [
        "`ffn_down`",
        "0.255 \\| 0.498 \\| 0.734",
        "0.272 \\| 0.524 \\| 0.778",
        "0.314 \\| 0.561 \\| 0.818",
        "0.272 \\| 0.532 \\| 0.785",
    ]


def test_levels():
    batches = [("token", 1), ("token", 2), (128, 2), (512, 2)]
    rows, runs = committed_rows("elastic-time"), []
    for i, (what, n_threads) in enumerate(batches):
        info = {}
        for level, *cells in rows:
            share = (numbers(cells[2 * i + 1]) * 3)[:3]
            block = "{} ({} to {})".format(*share)
            ms = median(numbers(cells[2 * i])[0])
            info[level.replace(" ", "")] = {"ms": ms, "block time": block}
        params = {"what": what, "n_threads": n_threads}
        runs.append(bench("bench_elastic::bench_levels", info, **params))
    assert made("elastic-time", document(*runs)) == rows


def test_adapters():
    rows, runs = committed_rows("elastic-adapters"), []
    for what, first in (("token", 1), (256, 4)):
        info = {}
        for row in rows:
            ms, ours, theirs = row[first : first + 3]
            ways = {"adapters": three(ours), "llama.cpp's": three(theirs)}
            info[row[0].replace(" ", "")] = {"ms": three(f"{ms} {ms} {ms}"), **ways}
        runs.append(bench("bench_elastic::bench_adapters", info, what=what))
    assert made("elastic-adapters", document(*runs)) == rows


def test_levels_with_cut_keys_and_values():
    rows, runs = committed_rows("elastic-cut-time"), []
    for what, first in (("token", 3), (512, 6)):
        info = {}
        for level, *cells in rows:
            whole, cut, ratio = cells[first - 1 : first + 2]
            info[level.replace(" ", "")] = {
                "whole": median(numbers(whole)[0]),
                "cut": median(numbers(cut)[0]),
                "ratio": three(ratio),
                "shares": [numbers(cell)[0] / 100 for cell in cells[:2]],
            }
        runs.append(bench("bench_keys_values::bench_cut", info, what=what))
    assert made("elastic-cut-time", document(*runs)) == rows


def test_budgets():
    *rows, fits = committed_rows("flash-budgets")
    runs = [bench("bench_flash::bench_exact", {}, model="moe", share=0.5)]
    for row in rows[::-1]:
        cells = [numbers(cell) for cell in row]
        info = {"budget_mib": int(cells[0][0]), "ours_ms": three(row[2])}
        info |= {"vanilla_ms": median(cells[3][0]), **speedup(*cells[4])}
        info |= {"over_floor": cells[5][0], "read_mb": cells[6][0]}
        info |= {"disk_gb_s": median(cells[7][0]), "peak_mib": int(cells[8][0])}
        share = cells[1][0] / 100
        runs.append(bench("bench_flash::bench_exact", info, model="1b", share=share))
    ratio = "{} ({} to {})".format(*numbers(fits[4]))
    info = {"budget_mib": 850, "peak_mib": 629, "ours_ms": three(fits[2]), "speedup": ratio}
    runs.append(bench("bench_flash::bench_fits", info | {"vanilla_ms": median(52.4)}))
    rows[5][2] = "88.0 (88.0–89.0)"  # medians have three digits
    assert made("flash-budgets", document(*runs)) == [*rows, fits]


def sparse_info(ms, ratio, read="", wasted="", hits=""):
    info = {"ms": three(ms), "speedup": "{} ({} to {})".format(*(numbers(ratio) * 3)[:3])}
    if read:
        info["read_mb"] = numbers(read)[0]
        info["wasted_mb"] = numbers(wasted)[0] if wasted else 0.1
        info["hits"] = numbers(hits)[0] / 100 if hits else 0.0
    return info


def test_modes():
    names = ("vanilla", "exact", "sparse", "top_k", "busiest", "shared", "layer")
    whole, limited = {"budget_mib": 955}, {"budget_mib": 318}
    for name, row in zip(names, committed_rows("sparse-speed"), strict=True):
        _, ms, ratio, ms_limited, ratio_limited, hits, read = row
        whole[name] = sparse_info(ms, ratio)
        limited[name] = sparse_info(ms_limited, ratio_limited, read, hits=hits)
    runs = [
        bench("bench_flash::bench_sparse", info, sparse_model="local", share=share)
        for share, info in ((0.6, limited), (1.8, whole))
    ]
    runs.append(bench("bench_flash::bench_sparse", {}, sparse_model="random", share=0.6))
    assert made("sparse-speed", document(*runs)) == committed_rows("sparse-speed")
    with pytest.raises(ValueError, match="one with little"):
        made("sparse-speed", document(*runs[1:]))


def test_levers():
    names = ["vanilla", "streamed", "on demand", *(f"on demand {x}" for x in ("top_k", "shared"))]
    names += [f"on demand {x}" for x in ("layer", "preload", "depth 16", "depth 4", "depth 1")]
    names += ["on demand gap 0", "on demand gap 64K", "2 layers", "2 layers preload", "4 layers"]
    names += ["4 layers preload", "4 layers all of the paper's"]
    rows = committed_rows("sparse-levers")
    info = {name: sparse_info(*row[1:]) for name, row in zip(names, rows, strict=True)}
    run = bench("bench_flash::bench_levers", info | {"budget_mib": 318})
    assert made("sparse-levers", document(run)) == rows


def test_searches():
    rivals = {"numpy fp32": "numpy", "faiss Flat": "faiss-flat", "faiss SQ8, refined": "faiss-sq8"}
    runs, label = [], ""
    for row in committed_rows("knn-scan"):
        label = row[0] or label
        rival = next(key for title, key in rivals.items() if row[2].startswith(title))
        recalls = (*numbers(row[4]), 1.0)[:2]
        info = {"ours_ms": median(float(row[1])), "vanilla_ms": median(numbers(row[2])[-1])}
        info |= inverse(*numbers(row[3])) | dict(
            zip(("recall", "rival_recall"), recalls, strict=True)
        )
        keys, form = label.split(", ")
        params = {"keys": keys, "form": "whole" if form.startswith("all") else "pca256"}
        runs.append(bench("bench_knn_scan::bench_search", info, **params, rival=rival))
    assert made("knn-scan", document(*runs[::-1])) == committed_rows("knn-scan")


def decoding(row, **params):
    info = {"ours_ms": median(float(row[2])), "vanilla_ms": median(float(row[3]))}
    info |= dict(zip(("speed", "speed_low", "speed_high"), numbers(row[4]), strict=True))
    info["more_mib"] = (*numbers(row[5]), 40.0)[0]
    return bench("bench_knn_decode::bench_decode", info, **params)


def test_decoding_on_several_machines():
    rows = committed_rows("knn-decode")
    epyc = document(decoding(rows[0], store=100_000, look_back=0), machine="EPYC")
    stores = ((100_000, 0), (400_000, 0), (100_000, 64))
    runs = [
        decoding(row, store=store, look_back=look_back)
        for row, (store, look_back) in zip(rows[1:], stores, strict=True)
    ]
    rows[2][5] = "40 MiB"
    assert made("knn-decode", epyc, document(*runs, machine="Xeon")) == rows


def test_sizes_of_datastores():
    info = {"search_ms": median(1.5), "mix_ms": median(0.25), "share": 0.0123}
    info |= {"memory_mb": 15.0, "keys_gb": 0.82}
    runs = [
        bench("bench_knn_sizes::bench_token", info | {"n_pairs": n}, store=n)
        for n in (1_000_000, 100_000)
    ]
    found = made("knn-sizes", document(*runs), same_columns=False)
    assert [row[0] for row in found] == ["1e5", "1e6"]
    assert found[0][1:] == ["1.50 (1.50–1.50)", "0.25 (0.25–0.25)", "1.2 %", "15.0 MB", "0.82 GB"]


def test_designs_that_select():
    runs = [
        bench(
            "bench_knn_select::bench_designs",
            {"seconds": i * n / 1000, "more_mib": 10.0 * i, "kept": 0},
            n_full=n,
            design=design,
        )
        for n in (2000, 1000)
        for i, design in enumerate(("offline", "online", "merging"), 1)
    ]
    assert made("knn-designs", document(*runs), same_columns=False) == [
        ["1,000", "1.00 s", "2.00 s", "3.00 s", "10 MiB", "20 MiB", "30 MiB"],
        ["2,000", "2.00 s", "4.00 s", "6.00 s", "10 MiB", "20 MiB", "30 MiB"],
    ]


def test_a_later_run_replaces_an_earlier_one():
    runs = [bench("bench_a::bench_it", {"n": n}, share=0.5) for n in (1, 2)]
    runs.append(bench("bench_b::bench_it", {"n": 3}, share=0.5))
    outputs = [document(run, machine="one") for run in runs]
    assert [run.info["n"] for run in benches(outputs, "bench_a::bench_it")] == [2]
    with pytest.raises(ValueError, match="no run of bench_c::bench_it"):
        benches(outputs, "bench_c::bench_it")
