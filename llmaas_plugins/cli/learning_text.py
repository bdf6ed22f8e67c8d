"""Text to learn adapters from: files, or what the model writes, kept until the adapters are."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.files import content_of
from llmaas_plugins.cli.models import evaluator_of
from llmaas_plugins.cli.output import progress_bar
from llmaas_plugins.files.file_bytes import as_store_error
from llmaas_plugins.files.partial_file import replaced

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmaas_plugins.model.forward import Evaluator

__all__ = ["add_text_option", "learning_windows", "own_text_path", "remove_progress"]

_DIGEST_BYTES = 32
_SEED = 0


def add_text_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--text``."""
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="text to learn from, best of the kind that the model will see (default: text that the "
        "model writes itself)",
    )


def learning_windows(args: argparse.Namespace, n_tokens: int, folder: Path) -> NDArray[np.int32]:
    """Return windows of ``n_tokens`` tokens of text in all, or of the whole text if it is shorter.

    All have the same length: a last window that is shorter is left out, unless it is the only one.

    Raises:
        ConfigError: A text cannot be read, or has no token.
        StoreError: The model's own text cannot be kept in ``folder``.
    """
    import numpy as np

    with evaluator_of(args.model) as (model, evaluator):
        if args.text:
            text = np.concatenate([_tokens(path, model) for path in args.text])
        else:
            text = _own(evaluator, n_tokens, own_text_path(folder, n_tokens))
        if not len(text):
            raise ConfigError("the text is empty. Give a longer text with `--text FILE`.")
        windows = list(evaluator.chosen(text, n_tokens))
    if len(windows) > 1 and len(windows[-1]) < len(windows[0]):
        windows.pop()
    return np.stack(windows)


def own_text_path(folder: Path, n_tokens: int) -> Path:
    """Return the path of the text that the model writes itself."""
    return folder / f"text-{n_tokens}.i32"


def remove_progress(folder: Path, used: Iterable[Path], own_text: Path | None) -> None:
    """Remove the files of a run that is complete, and their folder if it is empty then.

    Args:
        folder: Folder for progress, which other runs and the user may use, too.
        used: Files that only this run can use.
        own_text: Text that the model wrote for this run, if it did. It stays while there are
            checkpoints of other runs, which may have learned from the same text.
    """
    with contextlib.suppress(OSError):  # the result is written; what is left does no harm
        for path in used:
            path.unlink(missing_ok=True)
        if own_text is not None and not any(folder.glob("*.npz")):
            own_text.unlink(missing_ok=True)
        folder.rmdir()


# -- internals -----------------------------------------------------------------------------------


def _own(evaluator: Evaluator, n_tokens: int, path: Path) -> NDArray[np.int32]:
    """Return text that the model writes, from its file if it is there."""
    kept = _read(path, n_tokens, evaluator.n_vocab)
    if kept is None:
        with progress_bar("text", "token", n_tokens) as bar:
            kept = evaluator.say(n_tokens, _SEED, bar.update)
        content = kept.astype("<i4").tobytes()
        for _ in replaced(path, [hashlib.sha256(content).digest(), content]):
            pass
    return kept


def _read(path: Path, n_tokens: int, n_vocab: int) -> NDArray[np.int32] | None:
    """Return the tokens of a file, or None if there is none or it is damaged."""
    import numpy as np

    with as_store_error(f"cannot read {path}"):
        if not path.is_file() or path.stat().st_size > _DIGEST_BYTES + 4 * n_tokens:
            return None
        content = path.read_bytes()
    digest, text = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(text).digest() != digest:
        return None
    tokens = np.frombuffer(text, "<i4").astype(np.int32)
    return tokens if len(tokens) and tokens.min() >= 0 and tokens.max() < n_vocab else None


def _tokens(path: Path, model: Any) -> NDArray[np.int32]:
    import numpy as np

    return np.array(model.tokenize(content_of(path), False, False), np.int32)
