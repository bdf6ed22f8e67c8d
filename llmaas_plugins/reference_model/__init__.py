"""The packaged reference model; `MODEL_CARD.md` beside it says what it is and is not."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

__all__ = ["REFERENCE_MODEL", "reference_model_path"]

REFERENCE_MODEL = "reference-7m-q8_0.gguf"


def reference_model_path() -> Path:
    """Return the path of the packaged reference model (GGUF, Q8_0).

    Raises:
        FileNotFoundError: The file is missing or the package is not unpacked on disk; llama.cpp
            maps the model file and cannot read it from inside an archive.
    """
    path = Path(str(resources.files(__name__).joinpath(REFERENCE_MODEL)))
    if not path.is_file():
        raise FileNotFoundError(
            f"Packaged model {REFERENCE_MODEL} not found at {path}. Reinstall llmaas-plugins as an "
            "unpacked wheel, or pass a model path of your own."
        )
    return path
