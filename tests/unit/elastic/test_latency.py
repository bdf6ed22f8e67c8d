"""The table of each level's latency: interpolated, and kept in a file."""

from __future__ import annotations

import json

import pytest
from damages import FOREIGN, ODD, each
from preparing import prepare

from llmaas_hooks import ConfigError, StoreError, request_scope
from llmaas_plugins.elastic import latency as module
from llmaas_plugins.elastic import profiling
from llmaas_plugins.elastic.latency import Curves, Latency, Machine, latency_path

TTFT = Curves(
    n_tokens=(32, 128, 512),
    ms=(((20.0, 68.0, 260.0), (10.0, 40.0, 170.0)),),
    spread_ms=(((1.0,) * 3,) * 2,),
    held=(64, 256),
    held_ms=(((36.0, 132.0), (20.0, 79.0)),),
)
TPOT = Curves(
    n_tokens=(32, 512),
    ms=(((2.0, 4.0), (1.0, 3.0)),),
    spread_ms=(((0.1,) * 2,) * 2,),
    held=(128,),
    held_ms=(((2.5,), (1.4,)),),
)


def table(**changes):
    values = {
        "model": "m.gguf",
        "table": "uniform",
        "machine": Machine(cpu="x", n_cpus=2, llama_cpp="1"),
        "levels": (1.0, 0.5),
        "threads": (2,),
        "ttft": TTFT,
        "tpot": TPOT,
    }
    return Latency(**values | changes)


def test_times_are_linear_between_lengths_and_beyond_them():
    times = table()
    assert [times.ttft_ms(1.0, n, 2) for n in (32, 80, 128, 320)] == [20.0, 44.0, 68.0, 164.0]
    assert times.ttft_ms(1.0, 16, 2) == 12.0
    assert times.ttft_ms(1.0, 1024, 2) == 516.0
    assert times.ttft_ms(0.5, 0, 2) == 0.0
    # times of the narrower level
    assert times.ttft_ms(0.9, 128, 2) == times.ttft_ms(0.5, 128, 2) == 40.0
    assert times.ttft_ms(0.5, 256, 2) == 79.0  # the line from 128 to 512 is at 83
    assert times.tpot_ms(0.5, 272, 2) == 2.0
    assert times.tpot_ms(1.0, 0, 2) < times.tpot_ms(1.0, 32, 2)


def test_errors_are_those_at_lengths_that_were_held_out():
    off = [0.0, 0.0, 0.0, 4 + 1 / 3]
    shares = sorted(one / ms for one, ms in zip(off, (36, 132, 20, 79), strict=True))
    assert TTFT.errors().largest == pytest.approx(shares[-1])
    assert TTFT.errors().median == 0
    assert TPOT.errors().largest == pytest.approx(abs(2.4 - 2.5) / 2.5)


def test_threads_must_have_been_measured():
    with pytest.raises(
        ConfigError, match=r"with 4 threads were not measured, only with 2; `llmaas .*--threads 4`"
    ):
        table().tpot_ms(1.0, 10, 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"threads": (1, 2)},
        {"levels": (1.0,)},
        {"ttft": TTFT.model_copy(update={"n_tokens": (128, 32, 512)})},
        {"tpot": TPOT.model_copy(update={"held_ms": (((2.5,), (1.4, 1.0)),)})},
    ],
)
def test_tables_that_lack_something_are_refused(changes):
    with pytest.raises(ValueError, match=r"one time for each level|do not ascend"):
        table(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"ttft": TTFT.model_dump() | {"n_tokens": (32, 128, 1 << 70)}},
        {"ttft": TTFT.model_dump() | {"held": (64, 1 << 70)}},
        {"ttft": TTFT.model_dump() | {"held_ms": (((36.0, 1e300), (20.0, 79.0)),)}},
        {"threads": (1 << 70,)},
    ],
    ids=str,
)
def test_numbers_that_nobody_measured_are_refused(changes):
    with pytest.raises(ValueError, match=r"less than"):
        table(**changes)


def test_it_is_found_again(tmp_path):
    path = tmp_path / "new" / "times.json"
    assert Latency.load(path) is None
    table().save(path)
    table(model="other.gguf").save(path)
    assert Latency.load(path) == table(model="other.gguf")
    assert [file.name for file in path.parent.iterdir()] == ["times.json"]
    stored = json.loads(path.read_text())["errors"]["ttft"]["largest"]
    assert stored == TTFT.errors().largest


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"version":1', '"version":2', "should be 1"),
        ("68.0", "69.0", "checksum"),
        ("llmaas-latency", "llmaas-chunks", "should be 'llmaas-latency'"),
        ('{"format"', '{"format', "Invalid JSON"),
    ],
)
def test_damaged_files_and_other_versions_are_refused(tmp_path, old, new, problem):
    path = tmp_path / "times.json"
    table().save(path)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(StoreError, match=f"{problem}.*`llmaas elastic profile` writes a new one"):
        Latency.load(path)


@each({**FOREIGN, **ODD})
def test_files_that_are_none_are_refused(tmp_path, damage):
    damage(tmp_path / "times.json")
    with pytest.raises(StoreError, match=r"cannot read .*times\.json|writes a new one"):
        Latency.load(tmp_path / "times.json")


class Clocked:
    """Model with known times: a prompt takes its length, a token its context's length."""

    def __init__(self, monkeypatch):
        self.ctx, self.now, self.runs, self.n_threads = 7, 0.0, [], 0
        monkeypatch.setattr(profiling.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(profiling.llama_cpp, "llama_set_n_threads", self.set_n_threads)

    def set_n_threads(self, ctx, n_threads, n_threads_batch):
        assert (ctx, n_threads) == (self.ctx, n_threads_batch)
        self.n_threads = n_threads

    def n_vocab(self):
        return 100

    def reset(self):
        self.is_new = True

    def generate(self, tokens, temp):
        assert self.is_new
        self.is_new = False
        level = request_scope.current().levels
        self.runs.append((self.n_threads, level.prefill, len(tokens)))
        self.now += len(tokens) * level.prefill / self.n_threads
        yield 0
        while True:
            self.now += level.decode * (1 + len(tokens) / 1000)
            yield 0


def test_levels_take_turns_and_each_length_is_measured(monkeypatch):
    llama = Clocked(monkeypatch)
    plan = profiling.ProfilePlan("m.gguf", "uniform", (1.0, 0.5), (1, 2), (8, 32, 128))
    assert plan.held == (16, 64)
    seen = []
    found = profiling.profile(llama, plan, seen.append)
    assert plan.n_runs == 3 * 2 * 2 * 5
    assert seen == list(range(plan.n_runs))[::-1]
    assert llama.runs[1:5] == [(1, 1.0, 8), (1, 0.5, 8), (1, 1.0, 16), (1, 0.5, 16)]
    assert llama.runs[-2:] == [(2, 1.0, 128), (2, 0.5, 128)]
    assert found.ttft_ms(0.5, 32, 2) == pytest.approx(8000)
    assert found.ttft_ms(1.0, 100, 1) == pytest.approx(100_000)
    assert found.tpot_ms(0.5, 20, 2) == pytest.approx(510)
    assert found.ttft.errors().largest < 1e-9 > found.tpot.errors().largest
    assert max(found.ttft.spread_ms[0][0]) == pytest.approx(0, abs=1e-6)


def test_prompts_that_other_load_slowed_are_timed_again(monkeypatch):
    class Disturbed(Clocked):
        def generate(self, tokens, temp):
            if len(self.runs) in {8, 14}:  # two of three runs of 16 tokens
                assert len(tokens) == 16
                self.now += 100.0
            yield from super().generate(tokens, temp)

    plan = profiling.ProfilePlan("m.gguf", "uniform", (1.0,), (1,), (8, 32, 128))
    llama, seen = Disturbed(monkeypatch), []
    found = profiling.profile(llama, plan, seen.append)
    assert len(llama.runs) == 3 * 6 + 2
    assert seen == [*range(14, -1, -1), 0, 0], "a prompt that is timed again shows progress"
    assert found.ttft.held_ms[0][0] == pytest.approx((16_000, 64_000))


def test_files_are_told_apart_by_model_widths_and_machine(tmp_path, reference_model, monkeypatch):
    tables = ("uniform", "searched")
    model = prepare(reference_model, tmp_path / "a.gguf", tables=tables)
    other = prepare(reference_model, tmp_path / "b.gguf", levels=(1.0, 0.5))
    paths = {latency_path(model, "uniform"), latency_path(other, "uniform")}
    assert latency_path(model, "searched") in paths  # the same widths here
    machine = Machine(cpu="another", n_cpus=1, llama_cpp="1")
    monkeypatch.setattr(module.Machine, "this", lambda: machine)
    paths.add(latency_path(model, "uniform"))
    assert len(paths) == 3
    with pytest.raises(ConfigError, match="no table 'best'"):
        latency_path(model, "best")
    with pytest.raises(ConfigError, match="has no widths; `llmaas elastic prepare "):
        latency_path(reference_model, "uniform")
