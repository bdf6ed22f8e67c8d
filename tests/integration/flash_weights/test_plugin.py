"""flash_weights: a model that does not fit generates the same text as in memory."""

from __future__ import annotations

import os
import re
import shutil

import pytest
from cgroups import memory_group
from flash_apps import MIB, run

from llmaas_hooks import ConfigError
from llmaas_plugins import activate
from llmaas_plugins.cli.main import main
from llmaas_plugins.flash_weights.packed import packed_path

GENERATES = """
_, llama = app()
expected = tokens(llama, 16)
llama.close()
suite, llama = app(resident_bytes() + 50 * MIB)
found = [tokens(llama, 16) for _ in range(2)]
print(json.dumps([expected, found, streamed(suite)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_packed", [False, True], ids=["as it is", "packed"])
def test_what_does_not_fit_generates_what_it_generates_in_memory(model, packed, is_packed):
    path = packed if is_packed else model
    expected, found, status = run(path, GENERATES, is_packed=is_packed)
    assert found == [expected, expected]
    (streamed,) = status["models"]
    assert status["mode"] == "exact"
    assert 0 < streamed["kept_bytes"] < streamed["bytes"]
    assert streamed["read_bytes"] > 20 * (streamed["bytes"] - streamed["kept_bytes"])
    assert streamed["wasted_bytes"] < 0.05 * streamed["read_bytes"]


CHANGES = """
_, llama = app()
expected = tokens(llama, 60)
llama.close()
start = resident_bytes()
suite, llama = app(start + 72 * MIB)
flash = suite.plugin("flash_weights")
found, kept, over = [], [], 0
for i, token in zip(range(60), generator(llama)):
    if i in (20, 40):
        flash.set_memory_budget(start + (54 if i == 20 else 87) * MIB)
    if i in (30, 50):
        over = max(over, resident_bytes() - streamed(suite)["memory_budget"])
    found.append(token)
    kept.append(streamed(suite)["models"][0]["kept_bytes"])
print(json.dumps([expected, found, [kept[i] for i in (19, 30, 39, 50, 59)], over]))
"""


@pytest.mark.slow
def test_a_budget_that_changes_while_generating_takes_effect_within_ten_tokens(model):
    expected, found, kept, over = run(model, CHANGES)
    assert found == expected
    first, after_shrinking, small, after_growing, large = kept
    assert after_shrinking < first - 15 * MIB
    assert small == pytest.approx(after_shrinking, abs=3 * MIB)
    assert after_growing > small + 20 * MIB
    assert large >= after_growing - 3 * MIB
    assert over <= 0


@pytest.mark.slow
def test_a_budget_without_room_for_the_arena_is_refused_with_the_least_one(model):
    script = """
from llmaas_hooks import BudgetError
suite, llama = app(resident_bytes() + 60 * MIB)
flash = suite.plugin("flash_weights")
expected = tokens(llama, 16)
try:
    flash.set_memory_budget(10 * MIB)
except BudgetError as error:
    message = str(error)
before = streamed(suite)["memory_budget"]
import re
least = int(re.search(r"expected (\\d+) MiB", message)[1]) * MIB
flash.set_memory_budget(least + 2 * MIB)
print(json.dumps([message, before, least, expected, tokens(llama, 16), resident_bytes()]))
"""
    message, before, least, expected, found, resident = run(model, script)
    assert message.startswith("a memory_budget of 10 MiB cannot be met, because this ")
    assert before > least
    assert found == expected
    assert resident <= least + 2 * MIB


@pytest.mark.slow
def test_weights_make_room_for_the_app(model):
    script = """
import logging, numpy as np, time
logging.basicConfig(filename="/dev/null")
lines = []
class Lines(logging.Handler):
    def emit(self, record): lines.append(record.getMessage())
logging.getLogger("llmaas.flash_weights").addHandler(Lines())
suite, llama = app(resident_bytes() + 60 * MIB)
expected = tokens(llama, 100)
kept, unmet, found, mine = [], [], [], None
for i, token in zip(range(100), generator(llama)):
    if i == 30: mine = np.ones(80 * MIB, np.uint8)
    if i == 60: del mine
    time.sleep(0.03)
    found.append(token)
    status = streamed(suite)
    kept.append(status["models"][0]["kept_bytes"])
    unmet.append(status["unmet"])
print(json.dumps([expected, found, kept[29], kept[59], kept[99], lines, unmet]))
"""
    expected, found, before, meanwhile, after, lines, unmet = run(model, script)
    assert found == expected
    assert before > 20 * MIB
    assert meanwhile == 0
    assert after > 20 * MIB
    (line,) = [line for line in lines if "Every weight is streamed" in line]
    assert "expected" in line
    assert [unmet[i] is None for i in (0, 29, 40, 59, 99)] == [True, True, False, False, True]
    assert unmet[59].startswith("a memory_budget of")


def test_an_app_that_cannot_fit_is_told_before_the_model_is_loaded(small):
    script = """
try:
    app(30 * MIB)
except Exception as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""
    message = run(small, script, is_forked=True)
    assert "BudgetError: a memory_budget of 30 MiB cannot be met" in message


LEAST = """
import re
from llama_cpp import Llama
from llmaas_plugins import activate

with activate({{"plugins": {{"flash_weights": {{"memory_budget": {budget} * MIB}}}}}}):
    try:
        Llama(path, n_ctx=2048, verbose=False).close()
    except Exception as error:
        found = [type(error.__cause__).__name__, str(error)]
    else:
        found = None
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_refusal_names_a_budget_that_works_even_if_errors_are_only_logged(small):
    """The loading refuses for a short context, and the context's creation for the app's own."""
    budget, contexts = 30, []
    while (found := run(small, LEAST.format(budget=budget))) is not None:
        kind, message = found
        assert kind == "UnmetBudgetError"
        contexts.append(int(re.search(r"with a context of (\d+) tokens", message)[1]))
        budget = int(re.search(r"expected (\d+) MiB", message)[1])
    assert contexts == [512, 2048]


def test_a_model_that_fits_is_left_alone(small):
    script = """
suite, llama = app(resident_bytes() + 2000 * MIB)
tokens(llama, 4)
print(json.dumps(streamed(suite)))
"""
    status = run(small, script, is_forked=True)
    assert status["mode"] == "off"
    assert status["models"] == []
    assert "so it is not streamed" in status["left_alone"][str(small)]


@pytest.mark.slow
def test_a_process_in_a_cgroup_of_the_budget_is_not_killed(model):
    script = """
suite, llama = app(BUDGET)
found = tokens(llama, 40)
print(json.dumps([len(found), peak(), streamed(suite)["models"][0]["kept_bytes"]]))
"""
    budget = 150 * MIB
    with memory_group() as group:
        group.limit(budget)
        n, peak, kept = run(model, script.replace("BUDGET", str(budget)), group=group)
    assert n == 40
    assert peak <= budget
    assert kept > 0


@pytest.mark.slow
def test_without_a_setting_the_cgroups_limit_is_the_budget(small):
    script = """
suite, llama = app(10**12)
suite.plugin("flash_weights").set_memory_budget(None)
print(json.dumps(streamed(suite)["memory_budget"]))
"""
    with memory_group() as group:
        group.limit(400 * MIB)
        assert run(small, script, group=group) == pytest.approx(0.9 * 400 * MIB, rel=0.01)


@pytest.mark.slow
def test_a_packed_file_of_a_model_that_was_changed_is_refused(small_packed, tmp_path):
    path = shutil.copyfile(small_packed, tmp_path / "model.gguf")
    shutil.copyfile(packed_path(small_packed), packed_path(path))
    with path.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(b"\1" * 4096)
    script = """
try:
    app(60 * MIB)
except Exception as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""
    message = run(path, script, is_packed=True, is_forked=True)
    assert "it was made from another model file, or the model file has changed since" in message
    assert "Run `llmaas flash pack" in message


REPLACED = """
import logging, os
from pathlib import Path
from llmaas_patches.native import host
from llmaas_plugins.flash_weights import plugin
places = {"packed": (plugin, "packed_problem", ".packed"), "model": (host, "fill_table", ".gguf")}
module, name, suffix = places[what]
original = getattr(module, name)
def replacing(*args):
    found = original(*args)
    os.replace(Path(path).with_name("other").with_suffix(suffix), Path(path).with_suffix(suffix))
    return found
setattr(module, name, replacing)
said = []
class Listening(logging.Handler):
    def emit(self, record): said.append(record.getMessage())
logging.getLogger("llmaas").addHandler(Listening())
table = {"memory_budget": resident_bytes() + 30 * MIB, "arena": 2 * MIB}
suite = activate({"on_error": on_error, "plugins": {"flash_weights": table}})
found, error = None, ""
try:
    llama = Llama(path, n_ctx=256, n_batch=64, n_threads=1, n_threads_batch=1, verbose=False)
    found = tokens(llama, 8)
    llama.close()
except Exception as raised:
    error = str(raised)
suite.deactivate()
expected = tokens(app()[1], 8)
print(json.dumps([found == expected, error, [line for line in said if "was replaced" in line]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["packed", "model"])
@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_a_file_that_is_replaced_during_the_load_is_refused(small_packed, tmp_path, what, on_error):
    """Otherwise the model in memory and the streamed weights would belong to two models."""
    folder = shutil.copytree(small_packed.parent, tmp_path / "copies")
    path = folder / "model.gguf"
    script = f"what, on_error = {what!r}, {on_error!r}" + REPLACED
    is_vanilla, error, said = run(path, script, is_packed=True)
    replaced = path if what == "model" else packed_path(path)
    told = f"{replaced} was replaced or changed while it was loaded; load the model again"
    if on_error == "raise":
        assert told in error
    else:
        assert is_vanilla
        assert [told in line for line in said] == [True]


@pytest.mark.parametrize("damage", ["cut off", "of nothing", "text"])
def test_a_damaged_packed_file_is_refused(small_packed, tmp_path, damage):
    path = shutil.copyfile(small_packed, tmp_path / "model.gguf")
    whole = packed_path(small_packed).read_bytes()
    content = {"cut off": whole[: len(whole) // 2], "of nothing": b"", "text": b"GGUF" * 999}
    packed_path(path).write_bytes(content[damage])
    script = """
try:
    app(60 * MIB)
except Exception as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""
    message = run(path, script, is_packed=True, is_forked=True)
    assert "is not a packed file, or is damaged" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "found no file"), (b"", "is not a GGUF file"), (b"GGUF", "is not a GGUF file")],
)
def test_what_cannot_be_packed(tmp_path, capsys, content, message):
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    assert main(["flash", "pack", str(path)]) == 2
    assert message in capsys.readouterr().err
    assert not packed_path(path).exists()


def test_packing_says_where_and_leaves_nothing_else(packed, capsys):
    capsys.readouterr()
    assert main(["flash", "pack", str(packed)]) == 0
    said = capsys.readouterr()
    assert str(packed_path(packed)) in said.out
    assert "repack" not in said.err
    assert sorted(path.name for path in packed.parent.iterdir()) == ["model.gguf", "model.packed"]


def test_a_setting_that_is_no_size_is_an_error():
    with pytest.raises(ConfigError, match="memory_budget"):
        activate({"plugins": {"flash_weights": {"memory_budget": "plenty"}}})
