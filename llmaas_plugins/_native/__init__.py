"""Python interface of the C core: KV blobs, chunk codecs, store I/O, budgets, kNN, signals.

No other package imports the cffi module. Calls release the GIL while they run.
"""

from __future__ import annotations

from .base import NativeError, Status
from .budget import Budget
from .chunk import (
    CHUNK_BITS,
    ChunkInfo,
    Codec,
    chunk_bound,
    chunk_cut,
    chunk_encode,
    chunk_peek,
    chunk_verify,
    chunks_decode,
    chunks_decode_at,
    chunks_land_at,
    landings_fit,
)
from .io import read_rate
from .kernels import crc32c, kernels_name, kernels_select
from .knn import (
    KNN_ALIGN,
    KNN_MAX_BEST,
    KNN_MAX_DIMS,
    KnnCodes,
    LogitsInfo,
    Nearest,
    knn_quantize,
    knn_rescore,
    knn_scan,
    knn_stride,
    knn_sum,
    logits_mix,
    logits_peek,
)
from .kv import (
    KVGeometry,
    blob_check,
    blob_init,
    blob_positions,
    blob_probe,
    blob_size,
    blob_sort,
)
from .signals import exit_on_signal
from .store import STORE_BLOCK, store_erase, store_read, store_write

__all__ = [
    "CHUNK_BITS",
    "KNN_ALIGN",
    "KNN_MAX_BEST",
    "KNN_MAX_DIMS",
    "STORE_BLOCK",
    "Budget",
    "ChunkInfo",
    "Codec",
    "KVGeometry",
    "KnnCodes",
    "LogitsInfo",
    "NativeError",
    "Nearest",
    "Status",
    "blob_check",
    "blob_init",
    "blob_positions",
    "blob_probe",
    "blob_size",
    "blob_sort",
    "chunk_bound",
    "chunk_cut",
    "chunk_encode",
    "chunk_peek",
    "chunk_verify",
    "chunks_decode",
    "chunks_decode_at",
    "chunks_land_at",
    "crc32c",
    "exit_on_signal",
    "kernels_name",
    "kernels_select",
    "knn_quantize",
    "knn_rescore",
    "knn_scan",
    "knn_stride",
    "knn_sum",
    "landings_fit",
    "logits_mix",
    "logits_peek",
    "read_rate",
    "store_erase",
    "store_read",
    "store_write",
]
