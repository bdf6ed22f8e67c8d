"""Write tests/data/golden for the current format version, without rewriting existing files."""

# ruff: noqa: INP001
from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from llmaas_plugins import _native as nat

GOLDEN = Path(__file__).parents[2] / "tests" / "data" / "golden"
N_TOKENS = 7
KEY = bytes(range(32))


def main() -> None:
    """Encode a small blob with every codec, cut one PLANES payload, and store all decoded bytes."""
    geom = nat.KVGeometry(3, False, 1, 1, (256, 6, 130), (192, 0, 128))
    blob = np.zeros(nat.blob_size(geom, N_TOKENS), np.uint8)
    rng = np.random.default_rng(1)
    n_values = len(blob) // 2
    values = rng.normal(size=n_values) * np.exp2(rng.integers(-3, 3, n_values))
    blob[: 2 * n_values] = values.astype(np.float16).view(np.uint8)
    nat.blob_init(geom, blob, list(range(N_TOKENS)))
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for codec, bits in [*((codec, 8) for codec in nat.Codec), (nat.Codec.PLANES, 3)]:
        name = f"v1-{codec.name.lower()}" + (f"-{bits}" if bits < 8 else "")
        out = bytearray(nat.chunk_bound(geom, codec, N_TOKENS))
        n = nat.chunk_encode(geom, codec, blob, N_TOKENS, 0, N_TOKENS, KEY, out)
        n = nat.chunk_cut(out[:n], bits)
        nat.chunks_decode(geom, [out[:n]], [0], blob_out := bytearray(blob), N_TOKENS)
        meta = {"geometry": geom.to_json(), "n_tokens": N_TOKENS, "key": KEY.hex()}
        write(GOLDEN / f"{name}.lkvc", bytes(out[:n]))
        write(GOLDEN / f"{name}.blob", bytes(blob_out))
        write(GOLDEN / f"{name}.json", json.dumps(meta, indent=1).encode() + b"\n")


def write(path: Path, data: bytes) -> None:
    """Create a file once."""
    if not path.exists():
        path.write_bytes(data)


if __name__ == "__main__":
    main()
