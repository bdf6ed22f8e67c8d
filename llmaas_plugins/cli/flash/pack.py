"""``llmaas flash pack``: files from which a model's weights are streamed."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError, StoreError, TensorInfo
from llmaas_plugins.cli.files import content_of
from llmaas_plugins.cli.flash.sharing import measured_shares
from llmaas_plugins.cli.given_text import tokens_of
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.models import add_model_action, check_file, identified, opening
from llmaas_plugins.cli.options import at_least
from llmaas_plugins.cli.output import progress_bar

if TYPE_CHECKING:
    from llmaas_plugins.flash_weights.calibration import Calibration
    from llmaas_plugins.flash_weights.operands import Operand
    from llmaas_plugins.flash_weights.shares import Shares

__all__ = ["add_pack", "is_packed", "tensors_of"]

_N_TOKENS, _N_FORESEEN = 2048, 512
"""Tokens that show how large values are, and which of them the layer before foresees."""
_MOST_GROUP_LAYERS = 64


def add_pack(actions: Any) -> None:
    """Register ``pack``."""
    parser = add_model_action(
        actions,
        "pack",
        pack,
        "write a model's weights in this processor's fastest layout",
        "Write a model's weights to a file beside it, in the layout to which llama.cpp repacks "
        "them on this processor. `flash_weights` then streams them from that file and computes as "
        "fast as llama.cpp with a model in memory. The model file is still needed. If the command "
        "is stopped, run it again to continue.",
        is_loaded=True,
    )
    parser.add_argument(
        "--sparse",
        action="store_true",
        help="also write the weights by columns, for the sparse mode, which reads only some "
        "columns for each token; the packed file is written if the model has none",
    )
    parser.add_argument(
        "--group-layers",
        type=_group_layers,
        default=1,
        metavar="N",
        help="with --sparse: layers whose columns are stored and read together (default 1)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="with --sparse: calibration text that shows which columns matter (default: text that "
        "the model writes itself)",
    )
    parser.add_argument(
        "--equal-shares",
        action="store_true",
        help="with --sparse: leave out the same share of each activation's values, as ActiveFlow "
        "does (default, if torch is installed: the shares that raise the loss least together)",
    )


def pack(args: argparse.Namespace) -> int:
    """Write a model's packed file, and with ``--sparse`` also its channel file."""
    needing_sparse = {
        "--text": args.text,
        "--group-layers": args.group_layers > 1,
        "--equal-shares": args.equal_shares,
    }
    for option, is_given in needing_sparse.items():
        if is_given and not args.sparse:
            raise ConfigError(f"{option} has no effect without --sparse.")
    tensors = tensors_of(args.model)
    with stoppable("repeat the command to write the rest"):
        identified(args.model)  # the file is written for this digest
        if not args.sparse or not is_packed(args.model, tensors):
            _pack(args.model, tensors)
        if args.sparse:
            _pack_channels(args, tensors)
    return 0


def tensors_of(model: Path) -> Mapping[str, TensorInfo]:
    """Return the tensors of a model.

    Raises:
        ConfigError: The file does not exist, or is not a GGUF file, or is itself a file that
            ``llmaas flash pack`` wrote.
    """
    from llama_cpp._logger import set_verbose

    from llmaas_patches.native.packing import model_tensors

    check_file(model)
    _refuse_packed(model)
    set_verbose(False)  # ggml logs every weight
    tensors = model_tensors(model)
    if not tensors:
        raise ConfigError(f"{model} is not a GGUF file, or is damaged.")
    return tensors


def is_packed(model: Path, tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether the model has a packed file that can be used on this machine."""
    from llmaas_plugins.flash_weights.packed import packed_path, packed_problem

    try:
        return packed_problem(packed_path(model), model, tensors) is None
    except StoreError:
        return False


# -- internals -----------------------------------------------------------------------------------


def _group_layers(text: str) -> int:
    number = at_least(1)(text)
    if number > _MOST_GROUP_LAYERS:
        raise argparse.ArgumentTypeError(
            f"expected at most {_MOST_GROUP_LAYERS} layers, found {number}"
        )
    return number


def _refuse_packed(model: Path) -> None:
    """Refuse a file that `pack` wrote: its own packed file would replace it."""
    from llmaas_plugins.flash_weights.channel_header import CHANNEL_FILE
    from llmaas_plugins.flash_weights.packed import PACKED_FILE
    from llmaas_plugins.model.gguf_header import read_header

    architecture = read_header(model).fields.get("general.architecture")
    for kind in (PACKED_FILE, CHANNEL_FILE):
        if architecture == kind.architecture:
            raise ConfigError(
                f"{model} is the {kind.name} of a model, expected the model: name the GGUF file "
                "beside it."
            )


def _pack(model: Path, tensors: Mapping[str, TensorInfo]) -> None:
    from llmaas_patches.native.packing import repack
    from llmaas_plugins.flash_weights.packed import packed_path, streamable, write_packed

    path, names = packed_path(model), streamable(tensors)
    _write(path, "packing", names, tensors, write_packed(model, path, tensors, repack))


def _pack_channels(args: argparse.Namespace, tensors: Mapping[str, TensorInfo]) -> None:
    from llmaas_plugins.flash_weights.channel_layout import channel_operands
    from llmaas_plugins.flash_weights.channels import channel_path, write_channels

    model, path, found = args.model, channel_path(args.model), channel_operands(tensors)
    text = content_of(args.text) if args.text else None
    shares = None
    if found and not args.equal_shares:
        shares = measured_shares(model, found, tensors, text)
    activities = _calibrated(args, found, text, shares) if found else {}
    names = [name for operand in found for name in operand.weights]
    writing = write_channels(model, path, tensors, activities, group_layers=args.group_layers)
    _write(path, "packing columns", names, tensors, writing)


def _write(
    path: Path,
    what: str,
    names: Iterable[str],
    tensors: Mapping[str, TensorInfo],
    writing: Iterator[int],
) -> None:
    n_bytes = sum(tensors[name].n_bytes for name in names)
    with progress_bar(what, "B", 2 * n_bytes) as bar:  # written, and read back
        for n_done in writing:
            bar.update(n_done)
    print(f"{path}: {path.stat().st_size / 1e6:,.0f} MB.")


def _calibrated(
    args: argparse.Namespace, operands: list[Operand], text: bytes | None, shares: Shares | None
) -> Calibration:
    """Calibrate a model's operands by evaluating a text."""
    from llmaas_plugins.activation import activate
    from llmaas_plugins.flash_weights.calibration import Calibrator

    calibrator = Calibrator()
    config = {"on_error": "raise", "plugins": {"flash_weights": {}}}
    with contextlib.ExitStack() as opened:
        opened.enter_context(activate(config, {"calibrator": calibrator}))
        model = opened.enter_context(opening(args.model))
        tokens = None if text is None else tokens_of(text, model)
        bar = opened.enter_context(progress_bar("calibrating", "token", _N_TOKENS + _N_FORESEEN))
        found = calibrator.calibrate(
            model.model, operands, tokens, shares=shares, n_tokens=_N_TOKENS, progress=bar.update
        )
        return calibrator.foresee(
            model.model, found, args.group_layers, tokens, n_tokens=_N_FORESEEN, progress=bar.update
        )
