"""Find files of more than 400 lines, and functions of more than 50.

    python -m llmaas_eval.house.sizes

The Python and C files of the packages and tests are checked, but C tests may be longer. Each
finding is one line; the status is 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["functions", "main", "too_long"]

FILE_LINES, FUNCTION_LINES = 400, 50
ROOTS = ("hooks", "patches", "llmaas_plugins", "native", "eval", "tests", "conftest.py")
_C_NAME = re.compile(r"(\w+)\s*\(")


def main() -> int:
    """Print the findings; return the exit status."""
    found = [finding for path in _tracked() for finding in too_long(path)]
    sys.stdout.writelines(f"{finding}\n" for finding in found)
    return 1 if found else 0


def too_long(path: Path) -> Iterator[str]:
    """Yield a sentence for the file, and for each of its functions, that is too long."""
    text = path.read_text()
    lines = text.count("\n")
    if lines > FILE_LINES:
        yield f"{path}: {lines} lines, at most {FILE_LINES} are allowed; split the file"
    for name, line, length in functions(path.suffix, text):
        if length > FUNCTION_LINES:
            yield (
                f"{path}:{line}: {name} has {length} lines, at most {FUNCTION_LINES} are allowed; "
                "split it"
            )


def functions(suffix: str, text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the first line and the number of lines of each function."""
    if suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1
        return
    begin, name = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"[A-Za-z_]", line):  # declarations begin in the first column, statements never
            begin, name = number, (_C_NAME.findall(line) or [line])[0]
        elif line == "}" and begin:
            yield name, begin, number - begin + 1
            begin = 0


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *ROOTS], capture_output=True, check=True)  # noqa: S603, S607
    names = listed.stdout.decode().split("\0")
    return [
        Path(name)
        for name in names
        if name.endswith((".py", ".c", ".h")) and not name.startswith("native/tests/")
    ]


if __name__ == "__main__":
    raise SystemExit(main())
