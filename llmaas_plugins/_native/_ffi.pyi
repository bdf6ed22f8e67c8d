# Types of the generated cffi extension. Handles and C data are opaque, so they are Any.

from typing import Any

from _typeshed import ReadableBuffer

class _FFI:
    NULL: Any
    def new(self, cdecl: str, init: object = ...) -> Any: ...
    def cast(self, cdecl: str, source: object) -> Any: ...
    def from_buffer(
        self, cdecl: str, buffer: ReadableBuffer, require_writable: bool = ...
    ) -> Any: ...
    def string(self, cdata: Any) -> bytes: ...
    def unpack(self, cdata: Any, length: int) -> Any: ...
    errno: int
    def gc(self, cdata: Any, destructor: Any, size: int = ...) -> Any: ...

class _Lib:
    LLMAAS_OK: int
    LLMAAS_EINVAL: int
    LLMAAS_ECORRUPT: int
    LLMAAS_ESPACE: int
    LLMAAS_EIO: int
    LLMAAS_EBUDGET: int
    LLMAAS_EUNSUPPORTED: int
    LLMAAS_ESTALE: int
    LLMAAS_KV_MAX_LAYERS: int
    LLMAAS_KV_MAX_ROW: int
    LLMAAS_CHUNK_HEADER: int
    LLMAAS_CHUNK_VERSION: int
    LLMAAS_CHUNK_MAX_TOKENS: int
    LLMAAS_CHUNK_BITS: int
    LLMAAS_KNN_MAX_DIMS: int
    LLMAAS_KNN_MAX_BEST: int
    LLMAAS_KNN_ALIGN: int
    LLMAAS_STORE_BLOCK: int

    def llmaas_status_name(self, status: int) -> Any: ...
    def llmaas_kernels_name(self) -> Any: ...
    def llmaas_kernels_select(self, name: bytes) -> int: ...
    def llmaas_crc32c(self, crc: int, data: Any, n: int) -> int: ...
    def llmaas_knn_quantize(self, codes: Any, first: int, n: int, keys: Any) -> int: ...
    def llmaas_knn_scan(
        self,
        codes: Any,
        first: int,
        n: int,
        query: Any,
        n_best: int,
        scratch: Any,
        rows: Any,
        distances: Any,
        n_found: Any,
    ) -> int: ...
    def llmaas_knn_sum(self, keys: Any, n: int, n_dims: int, sums: Any) -> int: ...
    def llmaas_knn_rescore(
        self, file: Any, rows: Any, n: int, query: Any, distances: Any
    ) -> int: ...
    def llmaas_logits_peek(self, logits: Any, n_vocab: int, info: Any) -> int: ...
    def llmaas_logits_mix(
        self,
        logits: Any,
        n_vocab: int,
        values: Any,
        distances: Any,
        k: int,
        alpha: float,
        beta: float,
        theta: float,
        far: float,
        info: Any,
    ) -> int: ...
    def llmaas_kv_geom_check(self, geom: Any) -> int: ...
    def llmaas_kv_geom_hash(self, geom: Any) -> int: ...
    def llmaas_blob_size(self, geom: Any, n_cells: int) -> int: ...
    def llmaas_blob_init(self, geom: Any, blob: Any, size: int, pos: Any, n_cells: int) -> int: ...
    def llmaas_blob_check(self, geom: Any, blob: Any, size: int, pos: Any, n_cells: int) -> int: ...
    def llmaas_blob_sort(self, geom: Any, blob: Any, size: int, n_cells: int) -> int: ...
    def llmaas_blob_probe(
        self, blob: Any, size: int, max_layers: int, info: Any, k_row: Any, v_row: Any
    ) -> int: ...
    def llmaas_blob_positions(self, blob: Any, size: int, pos: Any, n_cells: int) -> int: ...
    def llmaas_chunk_bound(self, geom: Any, codec: int, bits: int, n_tokens: int) -> int: ...
    def llmaas_chunk_encode(
        self,
        geom: Any,
        codec: int,
        bits: int,
        blob: Any,
        size: int,
        n_cells: int,
        first_cell: int,
        n_tokens: int,
        key: Any,
        dst: Any,
        cap: int,
        n_written: Any,
    ) -> int: ...
    def llmaas_chunk_peek(self, payload: Any, size: int, info: Any) -> int: ...
    def llmaas_chunk_cut(self, payload: Any, size: int, bits: int, new_size: Any) -> int: ...
    def llmaas_chunk_verify(self, payload: Any, size: int, key: Any) -> int: ...
    def llmaas_chunks_decode(
        self,
        geom: Any,
        n: int,
        payloads: Any,
        sizes: Any,
        first_cells: Any,
        blob: Any,
        blob_size: int,
        n_cells: int,
        n_done: Any,
    ) -> int: ...
    def llmaas_landings_fit(
        self, geom: Any, landings: Any, n_landings: int, n_cells: int
    ) -> bool: ...
    def llmaas_chunks_land(
        self,
        geom: Any,
        n: int,
        payloads: Any,
        sizes: Any,
        first_cells: Any,
        landings: Any,
        n_landings: int,
        n_cells: int,
        n_done: Any,
    ) -> int: ...
    LLMAAS_IO_BEST: int
    def llmaas_io_measure(
        self,
        kind: int,
        fd: int,
        n_file: int,
        n_bytes: int,
        depth: int,
        seconds: float,
        rate: Any,
    ) -> int: ...
    def llmaas_store_read(
        self,
        fd: int,
        n: int,
        offsets: Any,
        lengths: Any,
        dst: Any,
        keys: Any,
        is_ahead: bool,
        statuses: Any,
        stats: Any,
    ) -> int: ...
    def llmaas_store_write(
        self, fd: int, n: int, offsets: Any, lengths: Any, src: Any, stats: Any
    ) -> int: ...
    def llmaas_store_erase(
        self, fd: int, n: int, offsets: Any, lengths: Any, stats: Any
    ) -> int: ...
    def llmaas_signal_exit(self, number: int, status: int) -> int: ...
    def llmaas_signal_keep(self, number: int) -> int: ...
    def llmaas_signal_put_back(self, number: int) -> int: ...
    def llmaas_budget_new(self, limit: int) -> Any: ...
    def llmaas_budget_free(self, budget: Any) -> None: ...
    def llmaas_budget_reserve(self, budget: Any, n: int) -> int: ...
    def llmaas_budget_release(self, budget: Any, n: int) -> int: ...
    def llmaas_budget_used(self, budget: Any) -> int: ...
    def llmaas_budget_peak(self, budget: Any) -> int: ...
    def llmaas_budget_limit(self, budget: Any) -> int: ...
    def llmaas_budget_set_limit(self, budget: Any, limit: int) -> None: ...

ffi: _FFI
lib: _Lib
