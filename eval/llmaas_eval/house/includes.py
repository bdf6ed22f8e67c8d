"""Find includes of C headers that point to a higher layer, and circles of includes.

    python -m llmaas_eval.house.includes

``LAYERS`` lists the folders of native/ from the lowest to the highest. A file includes headers of
its own folder and of lower ones. A module is a header with the C file of the same name, and with a
private header (table_state.h belongs to table.c); no chain of includes leads from a module back to
itself. Each finding is one line; the status is 1 if there are any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

__all__ = ["main", "wrong_includes"]

LAYERS = (
    "include/llmaas",
    "kernels",
    "src",
    "backend/base",
    "backend/taps",
    "backend/attention",
    "backend/stream",
    "backend/weights",
    "backend/engine",
)
_SEARCHED = ("include", "backend", ".")  # for includes from another folder, as in native/CMakeLists
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def main() -> int:
    """Print the findings in native/; return the exit status."""
    found = list(wrong_includes(Path("native"), LAYERS))
    sys.stdout.writelines(f"{finding}\n" for finding in found)
    return 1 if found else 0


def wrong_includes(root: Path, layers: tuple[str, ...]) -> Iterator[str]:
    """Yield a sentence for each include from a higher layer, and for a circle if there is one."""
    modules: dict[str, set[str]] = {}
    for height, layer in enumerate(layers):
        for path in sorted((root / layer).glob("*.[ch]")):
            for name in _INCLUDE.findall(path.read_text()):
                header = _resolved(root, path, name)
                if header is None:
                    continue
                folder = header.parent.relative_to(root.resolve()).as_posix()
                if folder not in layers[: height + 1]:
                    yield f"{path}: includes {name}, but {folder} is no layer below {layer}"
                modules.setdefault(_module(path), set()).add(_module(header))
    for module, included in modules.items():
        included.discard(module)
    try:
        TopologicalSorter(modules).prepare()
    except CycleError as error:
        yield f"{root}: includes go in a circle: {' ← '.join(error.args[1])}"


def _module(path: Path) -> str:
    """Return the name of the module of a file."""
    stem = path.stem
    while "_" in stem and not path.with_name(f"{stem}.c").exists():
        stem = stem.rpartition("_")[0]
    own = stem if path.with_name(f"{stem}.c").exists() else path.stem
    return f"{path.parent.name}/{own}"


def _resolved(root: Path, path: Path, name: str) -> Path | None:
    """Return the included file of this project; None if it is another project's."""
    for folder in (path.parent, *(root / searched for searched in _SEARCHED)):
        if (folder / name).is_file():
            return (folder / name).resolve()
    return None


if __name__ == "__main__":
    raise SystemExit(main())
