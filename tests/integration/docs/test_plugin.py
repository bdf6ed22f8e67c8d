"""docs/tutorial/plugin.md and its plugin: installed, used and uninstalled as by a user.

Everything runs without network in a separate environment that sees this one's packages.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest
from commands import run_python

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "llmaas-usage"
TUTORIAL = (ROOT / "docs" / "tutorial" / "plugin.md").read_text()
EXCERPTS = re.findall(r"```\w+ file=(\S+)\n(.*?)```", TUTORIAL, re.DOTALL)
SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"

APP = """
from llama_cpp import Llama
from llmaas_plugins.reference_model import reference_model_path

llm = Llama(str(reference_model_path()), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
for text in ("Once upon a time", "I would like", "Once upon a time, I would like a room"):
    print(llm(text, max_tokens=6, temperature=0)["choices"][0]["text"])
"""
SERVICE = """
import json
from llmaas_plugins import activate
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.reference_model import reference_model_path
from llmaas_plugins.service import LLMService

config = ServiceConfig(state_dir="contexts")
with activate("llmaas.toml") as suite:
    model = reference_model_path()
    with LLMService.open(model, config, n_ctx=512, n_threads=1, n_threads_batch=1) as service:
        mail, chat = (service.bind(app).new_context(system="You help.") for app in ("mail", "chat"))
        for text in ("Write to Ana that I am late today.", "Shorter, please."):
            for context in (mail, chat):
                context.call(text, max_tokens=6)
        print(json.dumps({"ids": [mail.id, chat.id], **service.status()}))
"""
REQUESTS = """
from pathlib import Path
from llmaas_usage import Usage, UsageConfig

usage = Usage(UsageConfig(state_dir=Path("usage")))
print(usage.llmaas_status()["contexts"]["(stateless)"]["requests"])
usage.llmaas_shutdown()
"""
CONFIG = """
[plugins.usage]
state_dir = "usage"
daily_tokens = 100000

[plugins.kv_chunks]
codec = "lossless"
store = "kv"
"""


class Environment:
    """Virtual environment into which the example is installed and from which it is removed."""

    def __init__(self, folder):
        self._python = str(folder / "bin" / "python")
        self._site = folder / SITE
        self.run("-m", "venv", "--without-pip", str(folder), python=sys.executable)
        ours = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (self._site / "ours.pth").write_text(ours)

    def run(self, *arguments, python=None, **kwargs):
        return run_python(python or self._python, *arguments, **kwargs)

    def pip(self, *arguments):
        pip = ["-m", "pip", "--disable-pip-version-check", "--python", self._python]
        self.run(*pip, *arguments, python=sys.executable)

    def llmaas(self, *arguments, **kwargs):
        return self.run("-m", "llmaas_plugins.cli.main", *arguments, **kwargs)

    def files(self):
        return sorted(str(path.relative_to(self._site)) for path in self._site.rglob("*"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("environment"))
    before = environment.files()
    tree = sorted(EXAMPLE.rglob("*"))
    environment.pip(
        *("install", "--no-deps", "--no-build-isolation", "--no-index", "--no-compile"),
        str(EXAMPLE),
    )
    assert any("llmaas_usage" in name for name in environment.files())
    yield environment
    environment.pip("uninstall", "--yes", "llmaas-usage")
    assert environment.files() == before
    assert sorted(EXAMPLE.rglob("*")) == tree  # nothing was built into the sources


@pytest.fixture
def folder(tmp_path, reference_model):
    (tmp_path / "llmaas.toml").write_text(CONFIG)
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


@pytest.mark.slow
def test_it_is_found_and_described(environment, folder):
    rows = json.loads(environment.llmaas("plugins", "--json", cwd=folder))
    row = {row["name"]: row for row in rows}["usage"]
    assert row["distribution"] == "llmaas-usage 0.1.0"
    assert (row["enabled"], row["loaded"]) == (False, False)
    rows = json.loads(
        environment.llmaas("plugins", "--json", "--config", "llmaas.toml", cwd=folder)
    )
    row = {row["name"]: row for row in rows}["usage"]
    assert row["enabled"]
    assert row["error"] is None
    assert "llmaas_logits" in row["hooks"]
    assert [key["name"] for key in row["keys"]] == ["state_dir", "daily_tokens", "keep_days"]
    assert all(key["description"] for key in row["keys"])


@pytest.mark.slow
def test_doctor_finds_it_well(environment, folder):
    said = environment.llmaas("doctor", "--config", "llmaas.toml", cwd=folder)
    assert "ok plugins.usage.daily_tokens = 100000   (llmaas.toml)" in said
    assert "MiB free" in said
    assert not (folder / "usage").exists()


@pytest.mark.slow
def test_an_app_under_llmaas_run(environment, folder):
    vanilla = environment.run("app.py", cwd=folder)
    command = ["run", "--config", "llmaas.toml", "app.py"]
    assert environment.llmaas(*command, cwd=folder) == vanilla
    assert environment.run("-c", REQUESTS, cwd=folder) == "3\n"


def test_an_app_beyond_the_budget_says_nothing(environment, folder):
    (folder / "llmaas.toml").write_text('[plugins.usage]\nstate_dir = "usage"\ndaily_tokens = 1')
    assert environment.llmaas("run", "--config", "llmaas.toml", "app.py", cwd=folder).strip() == ""


@pytest.mark.slow
def test_the_service_with_contexts_kept(environment, folder):
    report = json.loads(environment.run("-c", SERVICE, cwd=folder))
    assert report["errors"] == {}
    usage, chunks = report["plugins"]["usage"], report["plugins"]["kv_chunks"]
    assert set(usage["contexts"]) == set(report["ids"])
    assert all(sums["requests"] == 2 for sums in usage["contexts"].values())
    assert chunks["restored_tokens"] > 0
    assert usage["budget_left"] == 100000 - usage["evaluated"]
    (shown,) = re.findall(r"```json\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    assert shape(json.loads(shown)) == shape(usage)


def shape(report):
    return list(report), {key for sums in report["contexts"].values() for key in sums}


@pytest.mark.slow
def test_its_own_tests_pass(environment):
    tidy = ("-p", "no:cacheprovider")  # the cache would leave a folder behind
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = environment.run("-m", "pytest", "-q", *tidy, cwd=EXAMPLE, environ=alone)
    assert " passed" in done
    assert "skipped" not in done


@pytest.mark.parametrize(("name", "text"), EXCERPTS, ids=[name for name, _ in EXCERPTS])
def test_the_tutorial_shows_the_examples_own_files(name, text):
    source = (EXAMPLE / name).read_text()
    for part in text.strip("\n").split("\n\n\n"):  # methods are shown without their class
        assert part in source or textwrap.indent(part, " " * 4) in source


def test_the_tutorial_names_every_file_of_the_example():
    (tree,) = re.findall(r"```\nllmaas-usage/\n(.*?)```", TUTORIAL, re.DOTALL)
    files = [path.relative_to(EXAMPLE) for path in EXAMPLE.rglob("*.*") if path.is_file()]
    found = {path.name for path in files if not re.search(r"(^|/)(\.|__pycache__)", str(path))}
    assert set(re.findall(r"[\w.]+\.\w+", tree)) == found


@pytest.mark.slow
def test_the_tutorials_first_steps(reference_model, capsys):
    steps = re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)
    namespace = {"__name__": "tutorial"}
    for step in steps:
        exec(compile(step, "docs/tutorial/plugin.md", "exec"), namespace)
    assert int(capsys.readouterr().out) == namespace["counter"].n_evaluated > 16
    assert namespace["hooks"].names() == []
