"""The datastore that is open for mixing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from llmaas_hooks import StoreError
from llmaas_plugins.knn_lm.build.build_datastore import KEYS_LEVEL
from llmaas_plugins.knn_lm.config import KnnLMConfig
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.mixing.mixer import MixSettings, MixSource

__all__ = ["Opened"]

_KEYS = ("ffn_input", "final_norm")


@dataclass(frozen=True, slots=True)
class Opened:
    """The datastore in use.

    Attributes:
        source: The datastore, and how it is mixed in.
        key: Kind of hidden states that are its keys.
    """

    source: MixSource
    key: Any

    @classmethod
    def open(cls, path: Path, config: KnnLMConfig) -> Self:
        """Open the datastore at a path.

        Raises:
            StoreError: It cannot be read, or its settings cannot be used.
        """
        datastore = Datastore.open(path, None, config.index)
        try:
            settings = MixSettings.of(datastore, config)
            return cls(MixSource(datastore, settings), _key_of(datastore))
        except ValueError as error:
            datastore.close()
            raise StoreError(
                f"datastore {path} has unusable settings: {error}. "
                "Select it again with `llmaas datastore select`."
            ) from error

    @property
    def datastore(self) -> Datastore:
        """Pairs that are searched."""
        return self.source.datastore

    def is_on_disk(self, digest: bytes) -> bool:
        """Return whether the datastore has this digest, and is still the one at its path."""
        return self.datastore.digest == digest and self.datastore.is_current()

    def require_model(self, path: Path, llama: Any, model: bytes) -> None:
        """Refuse a model that the datastore was not made with.

        Args:
            path: Path of the datastore.
            llama: The ``llama_cpp.Llama`` to serve.
            model: Fingerprint of its model.

        Raises:
            StoreError: The datastore belongs to another model, or does not fit this one.
        """
        datastore = self.datastore
        if datastore.fingerprint != model:
            raise StoreError(
                f"datastore {path} belongs to another model, or an earlier version built "
                f"it: found fingerprint {datastore.fingerprint.hex()[:12]}, expected "
                f"{model.hex()[:12]}. Set "
                "plugins.knn_lm.store to another directory, or build one for this model there."
            )
        found = datastore.n_embd, int(datastore.values.max(initial=0))
        expected = int(llama.n_embd()), int(llama.n_vocab())
        if found[0] != expected[0] or found[1] >= expected[1]:
            raise StoreError(
                f"datastore {path} does not fit this model: found keys of {found[0]} "
                f"numbers and token {found[1]}, expected {expected[0]} and tokens below "
                f"{expected[1]}. Select it again with `llmaas datastore select`."
            )

    @property
    def settings(self) -> MixSettings:
        """How the pairs are mixed in."""
        return self.source.settings


def _key_of(datastore: Datastore) -> Any:
    key = datastore.settings.get("key")
    if key not in _KEYS:
        raise ValueError(f"found key {key!r}, expected {' or '.join(_KEYS)}")
    level = datastore.settings.get("level", KEYS_LEVEL)  # older versions did not write "level"
    if level != KEYS_LEVEL:
        raise ValueError(f"found keys of level {level!r}, expected {KEYS_LEVEL}")
    return key
