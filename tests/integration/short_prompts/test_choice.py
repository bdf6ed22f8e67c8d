"""Which scorer serves a model, while encoders are trained."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from llama_cpp import Llama
from served import wait_until
from tiny_encoders import N_EMBD, write_package

from llmaas_hooks import LlmaasError, hookimpl
from llmaas_plugins import activate
from llmaas_plugins.cli.deadlines.shares import shortened_prompts
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.short_prompts.encoder.body import read_body
from llmaas_plugins.short_prompts.encoder.model_file import GENERAL, EncoderFile, Head, encoder_path

TEXT = "the old keeper of the tower walks down to the water each morning and looks. " * 3


class Planner:
    """Plugin that notes how words of shorter prompts would be chosen."""

    def __init__(self):
        self.chosen_by = []

    @hookimpl
    def llmaas_level(self, cost):
        self.chosen_by.append(cost().shorter_by)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Return a function that writes an encoder in an own folder, a general one by default."""
    monkeypatch.setenv("HOME", str(tmp_path))
    body = read_body(write_package(tmp_path))
    encoder_path(GENERAL).parent.mkdir(parents=True)

    def train(seed, name=GENERAL):
        weight = np.random.default_rng(seed).standard_normal((2, N_EMBD)).astype(np.float32)
        EncoderFile.write(encoder_path(name), body, {}, Head(weight, np.zeros(2, np.float32)))

    return train


def test_an_encoder_is_used_as_soon_as_it_is_trained(reference_model, train):
    planner = Planner()
    config = {"on_error": "raise", "plugins": {"short_prompts": {"least_tokens": 32}}}
    with (
        activate(config, {"planner": planner}) as suite,
        contextlib.closing(Llama(str(reference_model), n_ctx=512, verbose=False)) as llama,
    ):
        plugin = suite.plugin("short_prompts")

        def ask():
            llama(TEXT, max_tokens=1)
            return plugin.scorer_name(llama), planner.chosen_by[-1]

        assert ask() == ("attention", "attention")
        train(1)
        name, first = ask()
        assert name == "encoder"
        assert plugin.scorer_identity(llama) == first  # as learned answers are named
        train(2)
        assert ask()[1] not in (first, "encoder")


def test_shares_of_prompts_are_not_chosen_by_two_encoders(reference_model, train):
    class Prompts(list):
        """Prompts after the first of which another encoder is trained."""

        def __iter__(self):
            yield self[0]
            train(2)
            yield self[1]

    train(1)
    with (
        activate({"on_error": "raise", "plugins": {"short_prompts": {"least_tokens": 8}}}) as suite,
        contextlib.closing(Llama(str(reference_model), n_ctx=16, verbose=False)) as llama,
    ):
        plugin = suite.plugin("short_prompts")
        tokens = np.array(llama.tokenize(TEXT.encode()), np.int32)
        scorer, found = shortened_prompts([0.7, 0.5], plugin, llama, [tokens] * 2)
        assert scorer == plugin.scorer_identity(llama)
        assert [len(parts) for parts in found] == [2, 2]
        with pytest.raises(LlmaasError, match=r"or found meanwhile\. Run the command again"):
            shortened_prompts([0.5], plugin, llama, Prompts([tokens] * 2))


def test_encoders_that_no_model_uses_any_more_are_not_kept_in_memory(reference_model, train):
    train(1)
    with (
        activate({"on_error": "raise", "plugins": {"short_prompts": {}}}) as suite,
        contextlib.closing(Llama(str(reference_model), n_ctx=512, verbose=False)) as llama,
        contextlib.closing(Llama(str(reference_model), n_ctx=512, verbose=False)) as other,
    ):
        plugin, tokens = suite.plugin("short_prompts"), llama.tokenize(TEXT.encode())

        def read(llama):
            """Return which encoders are in memory after a prompt was shortened, and its words."""
            found = plugin.shortened(llama, np.array(tokens, np.int32), [0.5])[0].tokens.tolist()
            encoders = plugin._scorers._encoders.items()
            return {path.stem for path, one in encoders if one._loaded is not None}, found

        assert read(other)[0] == {GENERAL}
        before = read(llama)
        digest = file_digest(reference_model)
        train(2, digest)
        wait_until(lambda: plugin.scorer_identity(llama).startswith(f"encoder {digest}"))
        assert read(llama)[0] == {GENERAL, digest}  # the other model has read nothing since
        assert read(other)[0] == {digest}
        encoder_path(digest).unlink()
        assert read(llama) == ({GENERAL, digest}, before[1])
        assert read(other) == ({GENERAL}, before[1])
        encoder_path(GENERAL).unlink()
        assert [plugin.scorer_name(one) for one in (llama, other)] == ["attention"] * 2
        assert all(one._loaded is None for one in plugin._scorers._encoders.values())
