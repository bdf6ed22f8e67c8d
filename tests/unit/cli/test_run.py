"""``llmaas run`` runs an app as ``python`` would, with the suite active."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import zipfile

import fork_server
import pytest

from llmaas_plugins.cli.main import main

PROBE = """
import atexit, json, pickle, sys
class Mine: pass
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__,
    "package": __package__, "spec": getattr(__spec__, "name", None),
    "is_main": sys.modules["__main__"].__dict__ is globals(),
}))
atexit.register(lambda: pickle.dumps(Mine))  # looked up in __main__, which must still be there
"""
ACTIVE = """
import sys, llmaas_plugins
suite = llmaas_plugins.active_suite()
print(suite.config.enabled(), "llama_cpp" in sys.modules)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "active.py").write_text(ACTIVE)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").write_text(PROBE)
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", PROBE)
    return tmp_path


@pytest.fixture
def python(folder, dist_plugins):
    """Run Python in ``folder`` with this process's import path."""
    path = os.pathsep.join(filter(None, sys.path))
    environ = os.environ | {"PYTHONPATH": path, "LLMAAS_PLUGINS": ""}

    def run(*args, start=subprocess.run, **extra):
        return start(
            [sys.executable, *args],
            cwd=folder,
            env={key: value for key, value in (environ | extra).items() if value is not None},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def llmaas(python):
    """Run ``llmaas`` in ``folder``, in a forked process unless ``start`` says otherwise."""
    return functools.partial(python, "-m", "llmaas_plugins.cli.main", start=fork_server.run)


@pytest.mark.parametrize(
    "args",
    [
        ("probe.py",),
        ("probe.py", "--config", "x", "-m", "--", "-v", "--help"),
        ("probe.py", "a b", ""),
        ("-m", "probe", "--plugins", "x"),
        ("-m", "package", "--version"),
        ("-mprobe", "a"),
    ],
)
@pytest.mark.slow
def test_as_python_would(python, llmaas, args):
    plain, run = python(*args), llmaas("run", *args)
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize("app", ["package", "app.zip"])
@pytest.mark.slow
def test_folder_or_archive(llmaas, folder, app):
    run = llmaas("run", app, "a")
    found = json.loads(run.stdout)
    assert found["path0"] == str(folder / app)
    assert (found["name"], found["argv"][1:]) == ("__main__", ["a"])


def test_a_link_runs_from_where_the_script_is(python, llmaas, folder):
    (folder / "package" / "link.py").symlink_to(folder / "probe.py")
    plain = python("package/link.py")
    run = llmaas("run", "package/link.py", start=subprocess.run)
    assert json.loads(run.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize("ending", ["3", "None", "'bad luck'", "True"])
@pytest.mark.slow
def test_exit_codes_are_kept(python, llmaas, folder, ending):
    (folder / "leave.py").write_text(f"import sys; sys.exit({ending})")
    plain, run = python("leave.py"), llmaas("run", "leave.py")
    assert (run.returncode, run.stderr) == (plain.returncode, plain.stderr)


@pytest.mark.parametrize(
    "code", ["1 / 0", "def broken(:", "import llmaas_hooks as h; raise h.ConfigError('mine')"]
)
@pytest.mark.slow
def test_an_uncaught_exception_looks_as_ever(python, llmaas, folder, code):
    (folder / "fail.py").write_text(code)
    plain, run = python("fail.py"), llmaas("run", "fail.py")
    assert run.returncode == plain.returncode == 1
    assert run.stderr == plain.stderr


def test_the_apps_excepthook_is_called(llmaas, folder):
    (folder / "fail.py").write_text("import sys\nsys.excepthook = lambda *a: print('hook')\n1 / 0")
    run = llmaas("run", "fail.py")
    assert (run.returncode, run.stdout, run.stderr) == (1, "hook\n", "")


HANDLERS = {
    "none": "",
    "own": "import signal; signal.signal(signal.SIGINT, lambda *_: sys.exit(7))",
    "excepthook": "sys.excepthook = lambda *_: print('hook', flush=True)",
    "caught": "caught = True",
}


@pytest.mark.parametrize(
    ("handler", "number", "status", "said"),
    [
        ("none", signal.SIGINT, 130, b"llmaas: stopped\n"),
        ("own", signal.SIGINT, 7, b""),
        ("excepthook", signal.SIGINT, 130, b""),
        ("caught", signal.SIGINT, 0, b""),
        ("none", signal.SIGTERM, -signal.SIGTERM, b""),  # as under python: no handler
    ],
)
@pytest.mark.slow
def test_a_signal_is_the_apps_first(folder, dist_plugins, *, handler, number, status, said):
    (folder / "wait.py").write_text(
        f"import sys, time\ncaught = False\n{HANDLERS[handler]}\ntry:\n"
        "    print('up', flush=True)\n    time.sleep(30)\n"
        "except KeyboardInterrupt:\n    if not caught: raise\n"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "llmaas_plugins.cli.main", "run", "wait.py"]
    with fork_server.Process(
        command,
        cwd=folder,
        env=environ | {"LLMAAS_PLUGINS": "recorder"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"up\n"
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stderr) == (status, said)
    assert stdout == (b"hook\n" if handler == "excepthook" else b"")


def test_nothing_enabled_is_said_once_in_a_line(llmaas):
    run = llmaas("run", "active.py", LLMAAS_PLUGINS=None)
    (line,) = run.stderr.splitlines()
    assert line.startswith("no plugin is enabled, so apps run without llmaas. LLMAAS_PLUGINS=")
    assert run.stdout == "[] True\n"


def test_the_suite_is_active_inside(llmaas):
    assert llmaas("run", "active.py").stdout == "[] True\n"


@pytest.mark.slow
def test_plugins_option_and_variable(llmaas):
    assert llmaas("run", "--plugins", "recorder", "active.py").stdout == "['recorder'] True\n"
    assert llmaas("run", "active.py", LLMAAS_PLUGINS="recorder").stdout == "['recorder'] True\n"
    off = llmaas("run", "--plugins", "", "active.py", LLMAAS_PLUGINS="recorder")
    assert off.stdout == "[] True\n"


def test_config_option(llmaas, folder):
    (folder / "my.toml").write_text("[plugins.recorder]\nlevel = 4")
    run = llmaas("run", "--config", "my.toml", "active.py", LLMAAS_PLUGINS=None)
    assert (run.stdout, run.stderr) == ("['recorder'] True\n", "")


def test_plugins_are_shut_down_also_after_a_failure(llmaas, folder):
    (folder / "fail.py").write_text(
        "import atexit, llmaas_test_plugins as p\natexit.register(lambda: print(p.events))\n1 / 0"
    )
    run = llmaas("run", "--plugins", "recorder", "fail.py", start=subprocess.run)
    assert run.stdout == "['construct', 'shutdown']\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run", "nope.py"), "no such script: nope.py. For a module, use `llmaas run -m`."),
        (("serv",), "Did you mean 'serve'?"),
        (("run", "."), ". has no __main__.py. Name the script to run."),
        (("run", sys.executable), "is a binary file, expected a Python script."),
        (("run", "-m", "nope_nope"), "no module named 'nope_nope'"),
        (("run", "--plugins", "recorde", "active.py"), "Did you mean 'recorder'?"),
        (("run", "--config", "no.toml", "active.py"), "cannot read configuration no.toml"),
        (("run",), "a SCRIPT or -m MODULE is required"),
        (
            ("run", "--plugin", "x", "active.py"),
            "llmaas run: error: unrecognized arguments: --plugin. Did you mean '--plugins'?",
        ),
        (("doctor", "a.gguf"), "llmaas doctor: error: unrecognized arguments: a.gguf"),
        (
            ("elastic", "prepare", "a.gguf", "--no-serach", "--xyz=1"),
            "llmaas elastic prepare: error: unrecognized arguments: --no-serach --xyz=1. "
            "Did you mean '--no-search'?",
        ),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    folder, dist_plugins, monkeypatch, capsys, *, args, message
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # the first entry becomes the app's folder
    try:
        code = main(args)
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert "error: " in said.err.splitlines()[-1]
    assert message in said.err.splitlines()[-1]
    assert "Traceback" not in said.err


def test_verbose_names_the_plugins(llmaas):
    run = llmaas("-v", "run", "--plugins", "recorder", "active.py")
    assert "INFO llmaas.cli: plugins: recorder" in run.stderr
