"""Datastores that are refused, and datastores that are replaced while they are used."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re

import pytest
from datastores import ENGINE, QUESTIONS, stored
from families import write_family
from knn_stores import FIRST, QUESTION, anywhere, ask, begin, report
from llama_cpp import Llama

from llmaas_eval.families import write_lora
from llmaas_hooks import PluginError, StoreError
from llmaas_plugins.knn_lm.archive.files import SELECTED
from llmaas_plugins.knn_lm.datastore.datastore import Datastore


class TestRefusal:
    """With ``raise`` every request gives the reason; with ``log`` one line does."""

    @pytest.fixture(params=["raise", "log"])
    def refused(self, request, active, make, alone, caplog):
        """Return a function that checks the refusal of the datastore and its reason."""

        def raises(llama, match):
            with pytest.raises(PluginError, match=match) as caught:
                ask(llama)
            assert isinstance(caught.value.__cause__, StoreError)
            assert caplog.records == []

        def logs(llama, match):
            (record,) = caplog.records
            assert re.search(match, record.getMessage())
            assert record.levelname == "ERROR"

        def check(match, **engine):
            suite = active(request.param)
            llama = make(**engine)
            for question in QUESTIONS[:2]:
                if request.param == "raise":
                    raises(llama, match)
                else:
                    found = ask(llama, question)
                    assert engine or found == alone[question]
                    logs(llama, match)
            (reason,) = report(suite)["left_alone"].values()
            assert re.search(match, reason)
            assert report(suite)["mixed"] == 0

        return check

    @pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.999])
    def test_a_torn_datastore(self, store, refused, share):
        store.write()
        whole = store.file.read_bytes()
        store.file.write_bytes(whole[: int(len(whole) * share)])
        refused(r"found (another kind of file|[\d,]+ bytes)")

    @pytest.mark.parametrize("at", [20, 4096 + 3, 8192 + 3])
    def test_a_damaged_datastore(self, store, refused, at):
        store.write()
        data = bytearray(store.file.read_bytes())
        data[at] ^= 1
        store.file.write_bytes(data)
        refused("found (a )?damaged")

    def test_a_file_of_another_kind(self, store, refused):
        store.directory.mkdir()
        store.file.write_text("something else")
        refused("found another kind of file")

    def test_a_directory_in_its_place(self, store, refused):
        store.file.mkdir(parents=True)
        refused(SELECTED)

    def test_a_datastore_of_another_model(self, store, refused):
        store.write(dataclasses.replace(store.pairs, fingerprint=b"f" * 32))
        refused(r"belongs to another model.*: found fingerprint .*\. Set plugins\.knn_lm\.store to")

    @pytest.mark.parametrize(
        "engine",
        [
            {"rope_freq_base": 20_000.0},
            {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 1e-3}},
        ],
        ids=str,
    )
    def test_a_datastore_of_the_model_used_in_another_way(self, store, refused, engine):
        store.write()
        refused("belongs to another model", **engine)

    @pytest.mark.parametrize(
        "settings",
        [
            {"mixture": None},
            {"mixture": ["alpha", "beta", "theta", "far"]},
            {"mixture": anywhere(alpha=2.0)},
            {"mixture": anywhere(beta=-1.0)},
            {"mixture": anywhere(theta=0.0)},
            {"mixture": anywhere(theta=1e-300)},
            {"mixture": anywhere(theta=1e300)},
            {"mixture": anywhere(theta="much")},
            {"mixture": anywhere(far=-1e300)},
            {"skip_above": None},
            {"skip_above": [1]},
            {"skip_above": "often"},
            {"skip_above": "nan"},
            {"skip_above": 1.5},
            {"key": "attention"},
            {"key": ["ffn_input"]},
        ],
        ids=str,
    )
    def test_settings_that_mean_nothing(self, store, refused, settings):
        store.write(**settings)
        refused("has unusable settings: .* Select it again")

    def test_tokens_that_the_model_has_not(self, store, refused):
        values = store.pairs.values.copy()
        values[7] = 4096
        store.write(dataclasses.replace(store.pairs, values=values))
        refused("does not fit this model: found keys of 256 numbers and token 4096")

    def test_keys_of_another_size(self, store, refused):
        keys = store.pairs.keys[:, :128].copy()
        store.write(dataclasses.replace(store.pairs, keys=keys))
        refused("does not fit this model: found keys of 128 numbers")

    def test_a_datastore_that_is_repaired(self, store, active, make, mixed):
        store.write()
        store.file.write_bytes(b"torn")
        suite = active()
        llama = make()
        with pytest.raises(PluginError, match="found another kind of file"):
            ask(llama)
        store.write()
        assert ask(llama) == mixed[QUESTION]
        assert report(suite)["left_alone"] == {}

    def test_keys_that_go_bad_later(self, store, active, make, mixed):
        """Keys are checked when they are read: one error, and one token of the model's own."""
        store.write()
        suite = active("log")
        llama = make()
        assert ask(llama) == mixed[QUESTION]
        with store.file.open("r+b") as file:
            file.seek(-store.pairs.keys.nbytes, 2)
            file.write(bytes(store.pairs.keys.nbytes))
        ask(llama, n=4)
        assert suite.hooks.errors()["knn_lm"]["llmaas_logits"]["count"] == 4

    def test_adapters_of_one_model_are_told_apart(self, tmp_path, store, active):
        model = write_family("llama", tmp_path / "llama.gguf")
        lora = write_lora("llama", tmp_path / "lora.gguf")
        plain, adapted = stored(model), stored(model, lora=lora)
        store.write(plain)
        suite = active()

        def ask_with(**more):
            with contextlib.closing(Llama(str(model), **ENGINE, **more)) as llama:
                return ask(llama)

        ask_with()
        assert report(suite)["mixed"] == 8
        for more in ({}, {"lora_scale": 0.5}):
            with pytest.raises(PluginError, match="belongs to another model"):
                ask_with(lora_path=str(lora), **more)
        store.write(adapted)
        with pytest.raises(PluginError, match="belongs to another model"):
            ask_with()
        ask_with(lora_path=str(lora))
        assert report(suite)["mixed"] == 16


def n_outputs(llama):
    """Return the number of a prompt's logit rows."""
    llama.reset()
    next(begin(llama, " ".join(QUESTIONS)))
    return sum(bool(llama._batch.batch.logits[i]) for i in range(llama.n_tokens))


class TestReplacement:
    """Datastores replaced while the process runs: the next request uses the current one."""

    def test_a_datastore_that_is_selected_again(self, store, active, make, mixed):
        store.write(mixture=anywhere(alpha=0.0))
        suite = active()
        llama = make()
        assert ask(llama) != mixed[QUESTION]
        store.write()
        assert ask(llama) == mixed[QUESTION]
        assert report(suite)["left_alone"] == {}

    def test_a_datastore_that_comes_and_goes(self, store, active, make, mixed):
        suite = active()
        llama = make()
        vanilla = ask(llama)
        store.write()
        assert ask(llama) == mixed[QUESTION]
        assert report(suite)["left_alone"] == {}
        store.file.unlink()
        assert ask(llama) == vanilla
        assert "there is no datastore" in str(report(suite)["left_alone"])
        assert (report(suite)["pairs"], report(suite)["memory_bytes"]) == (None, 0)

    def test_a_conversation_that_is_forgotten(self, store, active, make, mixed):
        store.write()
        suite = active()
        llama = make()
        assert ask(llama) == mixed[QUESTION]
        is_left = store.pairs.origins[:, 0] != 0
        assert Datastore.without(store.file, [FIRST]) == (~is_left).sum()
        forgetful = ask(llama)
        assert forgetful != mixed[QUESTION]
        assert report(suite)["pairs"] == is_left.sum()
        store.write(rows=is_left)
        assert ask(make()) == forgetful

    @pytest.mark.parametrize("is_forgotten", [False, True], ids=["replaced", "forgotten"])
    def test_a_request_that_is_under_way(self, store, active, make, mixed, is_forgotten):
        """The request continues with its datastore, or without it once that is gone."""
        store.write()
        suite = active()
        llama = make()
        ask(llama)
        stream = begin(llama)
        found = list(itertools.islice(stream, 4))
        if is_forgotten:
            Datastore.without(store.file, [FIRST])
        else:
            store.write()
        found += itertools.islice(stream, 4)
        stream.close()
        assert (found == mixed[QUESTION]) == (not is_forgotten)
        assert found[:4] == mixed[QUESTION][:4]
        assert suite.hooks.errors() == {}
        store.write()
        assert ask(llama) == mixed[QUESTION]

    def test_an_engine_is_left_as_it_was(self, store, active, make, alone):
        """The engine no longer outputs the extra rows that judged prompts."""
        store.write()
        active(look_back=32)
        llama = make()
        assert ask(llama) != alone[QUESTION]
        assert n_outputs(llama) == 32
        store.file.unlink()
        assert ask(llama) == alone[QUESTION]
        assert n_outputs(llama) == 1

    @pytest.mark.parametrize("swa_full", [True, False])
    def test_prompts_are_judged_where_no_token_can_be_evaluated_again(
        self, tmp_path, store, active, swa_full
    ):
        model = write_family("gemma3", tmp_path / "gemma3.gguf")
        store.write(stored(model))
        active(look_back=32)
        with contextlib.closing(Llama(str(model), **ENGINE, swa_full=swa_full)) as llama:
            assert n_outputs(llama) == 32

    def test_files_that_were_replaced_are_closed(self, store, active, make):
        store.write()
        suite = active()
        llama = make()
        for _ in range(3):
            store.write()
            ask(llama)
            assert store.links() == [str(store.file)]
        suite.deactivate()
        assert store.links() == []
