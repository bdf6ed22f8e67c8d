"""Which scorer serves a model, while encoders are trained."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from llama_cpp import Llama
from tiny_encoders import N_EMBD, write_package

from llmaas_hooks import hookimpl
from llmaas_plugins import activate
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
    """Return a function that writes a general encoder in an own folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    body = read_body(write_package(tmp_path))
    path = encoder_path(GENERAL)
    path.parent.mkdir(parents=True)

    def train(seed):
        weight = np.random.default_rng(seed).standard_normal((2, N_EMBD)).astype(np.float32)
        EncoderFile.write(path, body, {}, Head(weight, np.zeros(2, np.float32)))

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
