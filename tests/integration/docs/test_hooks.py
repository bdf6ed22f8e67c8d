"""The examples of docs/reference/hooks.md, run on the packaged model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmaas_hooks import HookManager, hookimpl, serving_context
from llmaas_hooks.implementations import Implementation
from llmaas_patches import install

TEXT = (Path(__file__).parents[3] / "docs" / "reference" / "hooks.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
TOP, *SECTIONS = re.split(r"^### `", TEXT, flags=re.MULTILINE)
EXAMPLES = {
    section.partition("(")[0]: block for section in SECTIONS for block in BLOCK.findall(section)
}
PROMPT = [1, 400, 401, 402, 403, 404]


def plugin_of(name):
    namespace = {"__name__": f"docs_{name}"}
    exec(compile(EXAMPLES[name], f"docs/reference/hooks.md {name}", "exec"), namespace)
    return namespace["Plugin"]()


def generate(llama, tokens, context_id=None):
    with serving_context(context_id or "other"):
        generator = llama.generate(tokens, temp=0.0)
        found = [next(generator) for _ in range(3)]
        generator.close()
    return found


def test_the_whole_plugin(reference_model, capsys):
    namespace = {"__name__": "docs_top"}
    for block in BLOCK.findall(TOP):
        exec(compile(block, "docs/reference/hooks.md", "exec"), namespace)
    assert capsys.readouterr().out.strip()
    assert namespace["hooks"].names() == []


@pytest.fixture
def called(monkeypatch):
    """Return the names of hooks whose implementations were called."""
    names, call = set(), Implementation.__call__

    def noting(self, arguments):
        names.add(self.hook)
        return call(self, arguments)

    monkeypatch.setattr(Implementation, "__call__", noting)
    return names


class Interrupting:
    """Keeps requests' cells in name only, and loses them in answers."""

    @hookimpl
    def llmaas_kv_restore(self, request):
        request.engine.keeps_cells = True

    @hookimpl
    def llmaas_turn(self, request, n_left):
        if n_left == 0:
            request.engine.llama._ctx.kv_cache_clear()


class Aside(Interrupting):
    """Puts requests aside and brings them back at once."""

    @hookimpl
    def llmaas_context_create(self, create):
        create.n_seats = 1
        create.params.n_seq_max, create.params.kv_unified = 2, True
        create.params.n_ctx *= 2

    @hookimpl
    def llmaas_turn(self, seat):
        seat.leave()
        seat.enter()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_called(name, make, called):
    plugin = plugin_of(name)
    hooks = HookManager("raise")
    hooks.register("example", plugin)
    if name in {"llmaas_turn", "llmaas_request_resume"}:
        hooks.register("interrupting", Interrupting())
    if name in {"llmaas_together", "llmaas_request_switch"}:
        hooks.register("aside", Aside())
    installed = install(hooks)
    try:
        llama = make()
        generate(llama, PROMPT)
        generate(llama, PROMPT)
        llama.eval([420])  # a batch of the app's own
        assert hooks.kv_evict("other") == 0
        installed.settle()
        hooks.status()
        hooks.memory()
        llama.close()
    finally:
        installed.revert()
        hooks.shutdown()
    assert name in called
    assert hooks.errors() == {}
    assert name != "llmaas_shutdown" or plugin.file.closed


class Stats:
    @hookimpl
    def llmaas_request_end(self, stats):
        self.last = stats


def test_the_restoring_example_restores(make, patched):
    vanilla = make()
    first = generate(vanilla, PROMPT)
    longer = [*PROMPT, *first, 420]
    expected = generate(vanilla, longer)
    stats = Stats()
    patched(example=plugin_of("llmaas_kv_restore"), stats=stats)
    llama = make()
    generate(llama, PROMPT, "chat")
    generate(llama, [1, 9, 8, 7], "another")
    assert generate(llama, longer, "chat") == expected
    assert stats.last.n_reused == len(PROMPT) + 2  # the third token was never evaluated
