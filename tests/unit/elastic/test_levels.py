"""Requested levels: by blocks and arguments, and the model's level that each one selects."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from llmaas_hooks import ConfigError, Levels, request_scope
from llmaas_plugins import activate, elastic
from llmaas_plugins.elastic.levels import level_index
from llmaas_plugins.service.level_arguments import check_levels, levels_in_header, levels_of

TENTHS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)


def test_blocks_ask_for_levels_and_inner_ones_count():
    seen = [request_scope.current().levels]
    with elastic.level(0.6, decode=0.8):
        seen.append(request_scope.current().levels)
        with elastic.level(prefill=0.4):
            seen.append(request_scope.current().levels)
        seen.append(request_scope.current().levels)
    seen.append(request_scope.current().levels)
    assert seen == [Levels(), Levels(0.6, 0.8), Levels(0.4, 0.8), Levels(0.6, 0.8), Levels()]


def test_an_error_ends_a_block():
    with pytest.raises(ZeroDivisionError), elastic.level(0.5):
        raise ZeroDivisionError
    assert request_scope.current().levels == Levels()


def test_a_block_is_of_its_own_thread():
    found = []
    with elastic.level(0.5):
        thread = threading.Thread(target=lambda: found.append(request_scope.current().levels))
        thread.start()
        thread.join()
    assert found == [Levels()]


@pytest.mark.parametrize("wrong", [0.1, 1.2, 60, "0.6", float("nan")])
def test_levels_that_do_not_exist(wrong):
    with pytest.raises(ConfigError, match=r"^the level must be a number from 0\.2 to 1\.0, found"):
        elastic.level(wrong)
    with pytest.raises(ConfigError, match=r"the level of decode must be .*1\.0, found"):
        elastic.level(decode=wrong)
    with pytest.raises(ConfigError, match=r"needs a level: level\(0\.6\)"):
        elastic.level()


@pytest.mark.parametrize(
    ("level", "expected"),
    [(1, 1.0), (0.6, 0.6), (1 - 0.4, 0.6), (0.69, 0.6), (0.2, 0.2), (0.99, 0.9), (0.1 + 0.2, 0.3)],
)
def test_between_two_levels_it_is_the_narrower(level, expected):
    assert TENTHS[level_index(TENTHS, level)] == expected
    assert level_index((1.0, 0.5), 0.3) == 1  # no narrower level exists


def test_a_block_needs_no_engine():
    code = (
        "import sys; from llmaas_plugins import elastic\n"
        "with elastic.level(0.6): pass\n"
        "sys.exit('llama_cpp' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_arguments():
    assert levels_of(None) == Levels()
    assert levels_of(0.6) == levels_of(Levels(0.6, 0.6)) == Levels(0.6, 0.6)
    assert levels_of({"decode": 0.8}) == Levels(decode=0.8)
    assert levels_in_header(" 0.6 ") == Levels(0.6, 0.6)
    assert levels_in_header("0.4/1") == Levels(0.4, 1.0)


@pytest.mark.parametrize("wrong", ["0.6", True, {}, {"decoding": 0.5}, {"decode": "x"}, [0.6]])
def test_arguments_that_are_no_levels(wrong):
    said = r"expected a level|the level (of decode )?must be a number from 0\.2"
    with pytest.raises(ConfigError, match=said):
        levels_of(wrong)


@pytest.mark.parametrize("wrong", ["half", "0.4/0.6/0.8", "/", "0.1", "nan", "0.6;0.8", "0.4/2"])
def test_headers_that_are_no_levels(wrong):
    said = r"expected a level such as 0\.6|the level (of decode )?must be a number from 0\.2"
    with pytest.raises(ConfigError, match=said):
        levels_in_header(wrong)


def test_the_plugin_must_be_on_and_the_model_prepared():
    check_levels(Levels())
    with pytest.raises(ConfigError, match="the plugin elastic is not on"):
        check_levels(Levels(0.5))
    with (
        activate({"plugins": {"elastic": {}}}),
        pytest.raises(ConfigError, match=r"the context has no levels.*`llmaas doctor`"),
    ):
        check_levels(Levels(0.5))
