"""``llmaas flash``: prepare models that are larger than memory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llmaas_hooks import ConfigError

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Register the sub-command and its own ones."""
    parser = subparsers.add_parser("flash", help="prepare models that are larger than memory")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    pack_ = actions.add_parser(
        "pack",
        help="write a model's weights as this processor multiplies them fastest",
        description="Write a model's weights to a file beside it, in the layout that llama.cpp "
        "repacks them to on this processor. `flash_weights` streams them from there then, and "
        "computes as fast as llama.cpp does with a model in memory. The model file stays needed.",
    )
    pack_.add_argument("model", type=Path, metavar="MODEL.gguf", help="the model")
    pack_.set_defaults(func=pack)


def pack(args: argparse.Namespace) -> int:
    """Write a model's packed file."""
    from llama_cpp._logger import set_verbose
    from tqdm import tqdm

    from llmaas_patches.native.packing import model_tensors, repack
    from llmaas_plugins.flash_weights.packed import packed_path, streamable, write_packed

    model, path = args.model, packed_path(args.model)
    if not model.is_file():
        raise ConfigError(f"found no file {model}; expected a model in GGUF.")
    set_verbose(False)  # ggml tells of every weight
    tensors = model_tensors(model)
    if not tensors:
        raise ConfigError(f"{model} is not a GGUF file, or is damaged.")
    n_bytes = sum(info.n_bytes for info in streamable(tensors).values())
    with tqdm(total=n_bytes, unit="B", unit_scale=True, desc="packing", disable=None) as bar:
        for n_done in write_packed(model, path, tensors, repack):
            bar.update(n_done)
    print(f"{path}: {n_bytes / 1e6:,.0f} MB.")
    return 0
