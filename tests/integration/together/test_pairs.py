"""Every two plugins, and all of them: the promised text, cold, warm, restarted and forked."""

from __future__ import annotations

import functools
import json
import shutil

import pytest
from budgets import is_streamed
from together import SETTINGS, changes, combinations, covering, is_exact, name_of, pairs, run


def met(combinations):
    """Return the settings in these combinations, by plugin."""
    return {one for combination in combinations for one in combination.items()}


COVERING = covering()
FEW = [one for i, one in enumerate(COVERING) if not set(one.items()) <= met(COVERING[:i])]
"""Combinations with a setting that no earlier one has; the others are slow tests."""
OTHERS = [one for one in (*pairs(), *combinations(*SETTINGS)) if one not in COVERING]


@pytest.fixture(scope="session")
def promised(model, shared):
    """Return a function from a combination to what its two stages say as promised."""

    @functools.cache
    def stages(name):
        return json.loads((folder_of(name) / "stages.json").read_text())

    def folder_of(name):
        settings = dict(one.split(": ") for one in name.split(", ") if one)

        def fill(folder):
            first = run(model, settings, folder, is_alone=True)
            then = run(model, settings, folder, first["contexts"], is_alone=True)
            (folder / "stages.json").write_text(json.dumps([first, then]))

        return shared(f"promised {name}", fill)

    return lambda combination: stages(", ".join(map(": ".join, changes(combination).items())))


def check(model, promised, store, combination):
    """Check the texts of a combination, and that each of its plugins took part."""
    first, then = promised(combination)
    found = run(model, combination, store)
    cold = {name: answers[:1] for name, answers in first["said"].items()}
    assert {name: answers[:1] for name, answers in found["said"].items()} == cold
    if is_exact(combination):
        assert found["said"] == first["said"]
        assert found["in_child"] == first["in_child"]
    again = run(model, combination, store, first["contexts"])
    if is_exact(combination):
        assert again["said"] == then["said"]
    assert found["status"]["errors"] == again["status"]["errors"] == {}
    check_work(combination, again["status"]["plugins"])


def check_work(combination, plugins):
    """Check that each plugin did its work."""
    assert plugins.keys() == combination.keys()
    if "kv_chunks" in combination:
        assert plugins["kv_chunks"]["restored_tokens"] > 0
        assert plugins["kv_chunks"]["left_alone"] == []
    if "flash_weights" in combination:
        assert all(map(is_streamed, plugins["flash_weights"]["models"]))
        assert plugins["flash_weights"]["mode"] == combination["flash_weights"]
    if "elastic" in combination:
        widths = changes(combination).get("elastic", "whole")
        levels = {"whole": {"1.0"}, "narrow": {"0.5"}, "narrow answers": {"0.5", "1.0"}}[widths]
        assert set(plugins["elastic"]["tokens"]) == levels
    if "deadlines" in combination:
        requests = plugins["deadlines"]["requests"]
        assert requests["promised"] >= 2
        assert requests["unplanned"] == (0 if "elastic" in combination else requests["promised"])
    if "knn_lm" in combination:
        check_datastore(combination, plugins["knn_lm"])


def check_datastore(combination, report):
    widths = changes(combination).get("elastic", "whole")
    assert report["left_alone"] == {}
    if combination["knn_lm"] == "mixing":
        assert (report["mixed"] > 0) == (widths != "narrow")
        assert (report["at_other_levels"] > 0) == (widths != "whole")
    elif combination["knn_lm"] == "drafts":
        is_own = not changes(
            combination
        )  # drafts are what the model says, and sparse answers have none
        assert not is_own or report["accepted"] > 0


@pytest.mark.parametrize(
    "combination",
    [
        pytest.param(one, id=name_of(one), marks=() if one in FEW else pytest.mark.slow)
        for one in COVERING
    ],
)
def test_each_two_settings_together(model, promised, tmp_path, combination):
    check(model, promised, tmp_path / "kv", combination)


@pytest.mark.slow
@pytest.mark.parametrize("combination", OTHERS, ids=name_of)
def test_pairs_alone_and_all_plugins(model, promised, tmp_path, combination):
    check(model, promised, tmp_path / "kv", combination)


WHOLE = {"kv_chunks": "lossless", "flash_weights": "exact", "elastic": "whole"}
SWITCHED = {
    "all off but one": (WHOLE | {"knn_lm": "drafts", "deadlines": "easy"}, {}),
    "all on": ({}, WHOLE | {"knn_lm": "drafts", "deadlines": "easy"}),
    "no sparse answers": ({"flash_weights": "sparse", "knn_lm": "mixing"}, {"elastic": "whole"}),
    "sparse answers": (WHOLE | {"knn_lm": "alpha 0"}, {"flash_weights": "sparse"}),
    "no mixing": (WHOLE | {"knn_lm": "mixing"}, {"deadlines": "easy"}),
}
"""Plugins beside kv_chunks before a restart, and after it."""


@pytest.mark.slow
@pytest.mark.parametrize("switched", SWITCHED.values(), ids=SWITCHED)
def test_contexts_are_used_where_plugins_are_switched_on_or_off(model, tmp_path, switched):
    before, after = ({"kv_chunks": "lossless"} | one for one in switched)
    contexts = run(model, before, tmp_path / "kv")["contexts"]
    expected = run(model, changes(after), tmp_path, contexts, is_alone=True)["said"]
    found = run(model, after, tmp_path / "kv", contexts)
    assert found["said"] == expected
    assert found["status"]["plugins"]["kv_chunks"]["restored_tokens"] > 0


def test_contexts_of_another_model_are_not_used(model, packaged_model, tmp_path):
    """The other one is the file that the first one was prepared of, with the same vocabulary."""
    other = shutil.copyfile(packaged_model, tmp_path / packaged_model.name)
    contexts = run(model, WHOLE, tmp_path / "kv")["contexts"]
    expected = run(other, {}, tmp_path, contexts, is_alone=True)["said"]
    found = run(other, {"kv_chunks": "lossless"}, tmp_path / "kv", contexts)
    assert found["said"] == expected
    assert found["status"]["plugins"]["kv_chunks"]["restored_tokens"] == 0


@pytest.mark.slow
def test_settings_that_change_the_text_do(promised):
    """So that a setting without effect fails here, and is not taken for one that keeps the text."""
    lossy = [
        {},
        {"flash_weights": "sparse"},
        {"elastic": "narrow"},
        {"elastic": "whole", "deadlines": "tight"},
        {"knn_lm": "mixing"},
    ]
    texts = [str(promised(one)[0]["said"]) for one in lossy]
    assert len(set(texts)) == len(lossy)
