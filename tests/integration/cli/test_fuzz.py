"""Odd arguments of commands give an exit status and a line, never a traceback or mixed JSON."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from llmaas_plugins.cli import commands
from llmaas_plugins.cli.main import main

N_ROUNDS = 20
NUMBERS = ("0", "-1", "1", "1e999", "nan", "", "9" * 30, "0x10", "٣", "1,", ",", "1.5", "x", "1%")
ABSURD = (str(2**31), str(2**63), str(2**70), "9" * 5000, "-1", str(-(2**70)), "inf", "-inf", "nan")
ABSURD += ("1e308", "-1e308", "1e999", "1e-320")
TEXTS = ("", "-", "--", "a\nb", "\x1b[31m", "\udcff", "x" * 300, "%s", "{}", "../..", "é")
LEFT_OUT = ("run", "serve", "demo")  # these run apps, llama_cpp.server, or minutes of work


def leaves(parser, path=()):
    """Yield the commands that do something, with their parsers."""
    (sub,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)] or [None]
    if sub is None:
        yield path, parser
        return
    for name, child in sub.choices.items():
        if name not in LEFT_OUT:
            yield from leaves(child, (*path, name))


COMMANDS = dict(leaves(commands._parser()))


@pytest.fixture(scope="module")
def places(tmp_path_factory, reference_model):
    """Return names of files, of folders and of things that are neither."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "empty").touch()
    (folder / "folder").mkdir()
    (folder / "noise").write_bytes(random.Random(0).randbytes(5000))
    (folder / "GGUF").write_bytes(b"GGUF\3\0\0\0" + random.Random(1).randbytes(5000))
    (folder / "latin-1.jsonl").write_bytes(b'{"messages": [{"role": "user", "content": "\xe9"}]}')
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "link").symlink_to("link")
    os.truncate(shutil.copy(reference_model, folder / "cut.gguf"), 3 << 20)
    os.mkfifo(folder / "pipe")
    names = [str(path) for path in sorted(folder.iterdir()) if path.name != "pipe"]
    return [
        *names,
        str(folder / "none"),
        str(folder / "none" / "below"),
        "/dev/null",
        "/",
        "~none/x",
    ]


def odd_value(rng, action, places):
    if action.choices is not None and rng.random() < 0.7:
        return str(rng.choice(list(action.choices)))
    if not action.option_strings and rng.random() < 0.1:
        return str(Path(places[0]).parent / "pipe")  # opening it would wait for a reader
    return rng.choice(rng.choice((NUMBERS, TEXTS, places, places)))


def odd_arguments(rng, parser, places):
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._VersionAction)):
            continue
        is_needed = action.required or not action.option_strings
        if rng.random() > (0.9 if is_needed else 0.4):
            continue
        n = 0 if action.nargs == 0 else rng.choice((1, 1, 1, 2)) if action.nargs == "*" else 1
        yield from action.option_strings[-1:]
        yield from (odd_value(rng, action, places) for _ in range(n))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_numbers_of_absurd_sizes_are_refused_by_every_option(path):
    """Each option has its own limits; none takes a number that nothing later can hold."""
    for action in COMMANDS[path]._actions:
        for text in () if action.type in (None, Path, str.upper) else ABSURD:
            try:
                found = action.type(text)
            except (argparse.ArgumentTypeError, ValueError):  # both become one line
                continue
            for number in found if isinstance(found, tuple) else [found]:
                assert abs(float(number)) < 2**63, (action.dest, text)


@pytest.mark.slow
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_odd_arguments(path, places, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    rng = random.Random(" ".join(path))
    for _ in range(N_ROUNDS):
        arguments = [*path, *odd_arguments(rng, COMMANDS[path], places)]
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
        said = capfd.readouterr()
        assert status in (0, 1, 2), arguments
        assert "Traceback" not in said.err, arguments
        if status == 2:
            assert said.out == "", arguments
            assert "error: " in said.err.splitlines()[-1], (arguments, said.err)
            assert said.err.splitlines()[-1].isprintable(), arguments
        elif "--json" in arguments:
            json.loads(said.out)
