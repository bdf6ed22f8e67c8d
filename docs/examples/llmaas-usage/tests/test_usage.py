"""Counting, and the end of the budget."""

import contextlib
import datetime

import pytest
from llama_cpp import Llama
from llmaas_hooks import serving_context
from llmaas_hooks.testing import check_contract
from llmaas_patches import install
from llmaas_plugins.kv_chunks.plugin import KVChunks
from llmaas_plugins.reference_model import reference_model_path
from pydantic import ValidationError

from llmaas_usage import Usage, UsageConfig, plugin
from llmaas_usage.ledger import COLUMNS, Ledger

PROMPT = [1, *range(400, 440)]
ONE = dict.fromkeys(COLUMNS, 1)


def generate(llama, tokens, n, context_id=None):
    with serving_context(context_id):
        generator = llama.generate(tokens, temp=0.0)
        found = [next(generator) for _ in range(n)]
        generator.close()
    return found


def test_the_contract(tmp_path, use):
    check_contract(Usage, {"state_dir": tmp_path}, use, install)


def test_replies_stay_as_they_are(running):
    def ask(llama):
        return [llama(text, max_tokens=6, temperature=0.0)["choices"] for text in ("Once", "Hello")]

    model = str(reference_model_path())
    settings = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}
    with contextlib.closing(Llama(model, n_ctx=256, **settings)) as llama:
        vanilla = ask(llama)
    with running(daily_tokens=1000) as (llama, _):
        assert ask(llama) == vanilla


def test_a_request_is_booked(running):
    with running() as (llama, status):
        reply = llama("Once upon a time", max_tokens=5, temperature=0.0)
        report = status()
    (name, sums), *others = report["contexts"].items()
    assert (name, others) == ("(stateless)", [])
    assert (sums["requests"], sums["reused"]) == (1, 0)
    assert sums["prompt"] == reply["usage"]["prompt_tokens"]
    assert sums["generated"] >= reply["usage"]["completion_tokens"]
    assert 0 < sums["first_token_s"] < sums["total_s"]
    assert report["evaluated"] == sums["evaluated"] >= sums["prompt"]
    assert report["budget_left"] is None


def test_contexts_are_apart_and_those_that_cost_most_come_first(running):
    with running() as (llama, status):
        generate(llama, PROMPT[:8], 2, "small")
        generate(llama, [7, *PROMPT], 2, "large")
        generate(llama, [9, *PROMPT], 2, "large")
        contexts = status()["contexts"]
    assert list(contexts) == ["large", "small"]
    assert contexts["large"]["requests"] == 2
    assert contexts["small"]["evaluated"] == 8 + 1  # the last token is never evaluated


def test_what_the_engine_still_holds_costs_nothing(running):
    with running() as (llama, status):
        first = generate(llama, PROMPT, 4)
        evaluated = status()["evaluated"]
        generate(llama, [*PROMPT, *first], 4)
        report = status()
    assert evaluated == len(PROMPT) + 3
    assert report["evaluated"] == evaluated + 1 + 3
    assert report["contexts"]["(stateless)"]["reused"] == len(PROMPT) + 3


def test_what_kv_chunks_restored_costs_nothing(running, tmp_path):
    chunks = KVChunks(KVChunks.Config(codec="lossless", store=tmp_path / "kv"))
    with running([("kv_chunks", chunks)]) as (llama, status):
        generate(llama, PROMPT, 2, "chat")
        generate(llama, [5, *PROMPT], 2, "other")
        before = status()["evaluated"]
        generate(llama, PROMPT, 2, "chat")
        report = status()
    assert report["contexts"]["chat"]["reused"] >= 32  # two chunks of 16
    assert report["evaluated"] - before < len(PROMPT) - 32 + 3


def test_replies_end_with_the_budget(running):
    with running() as (llama, _):
        free = llama("Once upon a time", max_tokens=24, temperature=0.0)["usage"]
    budget = free["prompt_tokens"] + 6
    with running(daily_tokens=30 + budget) as (llama, status):
        assert status()["budget_left"] > 6  # the first run is booked
        reply = llama("Once upon a time", max_tokens=24, temperature=0.0)
        after = status()
        nothing = llama("Once upon a time", max_tokens=24, temperature=0.0)
    assert reply["usage"]["completion_tokens"] < free["completion_tokens"]
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert after["budget_left"] == 0
    assert nothing["choices"][0]["text"] == ""


def test_a_stream_that_is_left_early_is_booked(running):
    with running() as (llama, status):
        stream = llama("Once upon a time", max_tokens=24, stream=True)
        next(stream)
        stream.close()
        assert status()["contexts"]["(stateless)"]["requests"] == 1


class Tomorrow(datetime.date):
    @classmethod
    def today(cls):
        return datetime.date.today() + datetime.timedelta(days=1)


def test_a_new_day_has_a_new_budget(running, monkeypatch):
    with running(daily_tokens=10, keep_days=1) as (llama, status):
        generate(llama, PROMPT, 2)
        assert status()["budget_left"] == 0
        monkeypatch.setattr(plugin, "date", Tomorrow)
        assert status()["budget_left"] == 10


def test_old_days_are_deleted(running, tmp_path):
    ledger = Ledger(tmp_path)
    ledger.add("2001-01-01", "chat", **ONE)
    with running() as (_, status):
        status()
    assert ledger.evaluated("2001-01-01") == 0
    ledger.close()


def test_processes_share_the_file(tmp_path):
    first, second = Ledger(tmp_path), Ledger(tmp_path)
    first.add("2027-01-31", "chat", **ONE)
    second.add("2027-01-31", "chat", **ONE)
    assert first.contexts("2027-01-31") == {"chat": dict.fromkeys(COLUMNS, 2)}
    first.close()
    second.close()


def test_asking_before_any_request(running):
    with running(daily_tokens=5) as (_, status):
        assert (status()["evaluated"], status()["budget_left"]) == (0, 5)


def test_unknown_keys_are_errors():
    with pytest.raises(ValidationError):
        UsageConfig(daily_token=5)
