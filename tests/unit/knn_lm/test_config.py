"""Table ``[plugins.knn_lm]``: accepted values, and errors that name the next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmaas_hooks import ConfigError
from llmaas_plugins._native import KNN_MAX_BEST
from llmaas_plugins.config import load_config, validated
from llmaas_plugins.knn_lm.config import KnnLMConfig


def configured(table, environ=None):
    config = load_config({"plugins": {"knn_lm": table}}, environ or {})
    return validated("knn_lm", KnnLMConfig, config.plugins["knn_lm"])


def test_defaults_are_the_papers_and_what_was_fitted():
    config = configured({})
    assert (config.key, config.k, config.size) == ("ffn_input", 100, 100_000)
    assert (config.alpha, config.beta, config.skip_above) == (None, None, None)
    assert config.store == Path("~/.cache/llmaas/knn")
    assert (config.mix, config.drafts, config.learn) == (True, False, False)


@pytest.mark.parametrize("name", ["alpha", "beta", "skip_above"])
def test_shares_are_from_0_to_1(name):
    for value in (0, 0.25, 1):
        assert getattr(configured({name: value}), name) == value
    for value in (-0.01, 1.01, float("nan")):
        with pytest.raises(ConfigError, match=rf"plugins\.knn_lm \(code\): {name}: .*found"):
            configured({name: value})


def test_as_many_neighbors_as_a_scan_can_return_for_each_other():
    most = KNN_MAX_BEST // 16
    assert configured({"k": most}).k == most
    with pytest.raises(ConfigError, match=f"k: .*expected at most {most}.*found {most + 1}"):
        configured({"k": most + 1})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"k": 0}, "k: .*expected at least 1"),
        ({"size": 0}, "size: .*found 0"),
        ({"dims": 0}, "dims: .*found 0"),
        ({"dims": "many"}, "dims: .*found 'many'"),
        ({"index": "guess"}, "index: .*found 'guess'"),
        ({"key": "attention"}, "key: .*'ffn_input' or 'final_norm'.*found 'attention'"),
        ({"idle_s": 0}, "idle_s: .*expected more than 0"),
        ({"learn": "sometimes"}, "learn: .*found 'sometimes'"),
        ({"store": 7}, "store: .*found 7"),
    ],
)
def test_wrong_values_name_the_key_and_what_was_found(table, message):
    with pytest.raises(ConfigError, match=r"plugins\.knn_lm \(code\): " + message):
        configured(table)


def test_unknown_key_suggests_the_known_one():
    with pytest.raises(ConfigError, match=r"unknown key 'alfa'.*'alpha'.*Known: alpha, beta, "):
        configured({"alfa": 0.5})


def test_every_setting_may_come_from_the_environment():
    written = {
        "store": "/elsewhere",
        "key": "final_norm",
        "size": "5000",
        "how": "top",
        "dims": "64",
        "index": "faiss",
        "k": "20",
        "alpha": "0.5",
        "beta": "0.25",
        "skip_above": "0.9",
        "look_back": "0",
        "mix": "false",
        "drafts": "true",
        "share_across_apps": "true",
        "learn": "true",
        "idle_s": "2.5",
    }
    assert set(written) == set(KnnLMConfig.model_fields)
    environ = {f"LLMAAS_PLUGINS__KNN_LM__{name.upper()}": value for name, value in written.items()}
    config = configured({}, environ)
    assert config == KnnLMConfig(
        store="/elsewhere",
        key="final_norm",
        size=5000,
        how="top",
        dims=64,
        index="faiss",
        k=20,
        alpha=0.5,
        beta=0.25,
        skip_above=0.9,
        look_back=0,
        mix=False,
        drafts=True,
        share_across_apps=True,
        learn=True,
        idle_s=2.5,
    )
    assert configured({"k": 7}, environ).k == 7  # code wins


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        configured({}).k = 10


def test_every_setting_is_described():
    assert all(field.description for field in KnnLMConfig.model_fields.values())
