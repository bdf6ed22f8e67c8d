"""``python -m llmaas_eval.elastic.ungrouped``: write a model without grouped queries.

    python -m llmaas_eval.elastic.ungrouped reference-7m-q8_0.gguf ungrouped.gguf

Each key and value head is written once for every query head that shares it, as in Llama-2-7B. The
model computes what it computed before.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from gguf import GGUFReader

from llmaas_eval.models import copy_field, finish, open_writer
from llmaas_plugins.elastic.units import blocks_of

__all__ = ["main", "write_ungrouped"]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the model; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m llmaas_eval.elastic.ungrouped")
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("output", type=Path, metavar="OUTPUT.gguf")
    args = parser.parse_args(argv)
    write_ungrouped(args.model, args.output)
    return 0


def write_ungrouped(source: Path, path: Path) -> Path:
    """Write a model with its keys and values repeated; return ``path``."""
    blocks, reader = blocks_of(source), GGUFReader(source)
    heads = f"{blocks.arch}.attention.head_count_kv"
    writer = open_writer(path, blocks.arch)
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name not in {"general.architecture", heads}:
            copy_field(writer, entry)
    writer.add_uint32(heads, blocks.n_groups * blocks.heads_per_group)
    for tensor in reader.tensors:
        data = tensor.data
        if re.search(r"\.attn_[kv]\.(weight|bias)$", tensor.name):
            groups = data.reshape(blocks.n_groups, -1)
            data = groups.repeat(blocks.heads_per_group, axis=0).reshape(-1, *data.shape[1:])
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    return finish(writer, path)


if __name__ == "__main__":
    raise SystemExit(main())
