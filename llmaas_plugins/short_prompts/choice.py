"""Choice of the scorer for each model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmaas_hooks import ConfigError, ModelLoad, NativeContext, StoreError, forks
from llmaas_plugins.model.digest import Digest, begin_digest
from llmaas_plugins.short_prompts.config import ScorerName
from llmaas_plugins.short_prompts.encoder.model_file import DIRECTORY, find_encoder
from llmaas_plugins.short_prompts.scorer import Scorer
from llmaas_plugins.short_prompts.scorers import SCORERS
from llmaas_plugins.short_prompts.scorers.encoder import EncoderScorer

__all__ = ["ScorerChoice"]

_ENCODER = "encoder"
_WITHOUT: ScorerName = "attention"
"""Scorer if none is named and no encoder was trained."""


class ScorerChoice:
    """Scorers of the models in use."""

    def __init__(self, name: ScorerName | None, natives: Mapping[int, NativeContext]) -> None:
        """Use the named scorer for all models, or by default a trained encoder if there is one.

        Args:
            name: Name of the scorer; None for the default.
            natives: Contexts in use, by address.
        """
        self._name, self._natives = name, natives
        self._lock = forks.lock()
        self._scorers: weakref.WeakKeyDictionary[Any, Scorer] = weakref.WeakKeyDictionary()
        self._encoders: dict[Path, EncoderScorer] = {}
        self._paths: weakref.WeakKeyDictionary[Any, Path | None] = weakref.WeakKeyDictionary()
        self._digests: weakref.WeakKeyDictionary[ModelLoad, Digest] = weakref.WeakKeyDictionary()

    def identify(self, context: NativeContext) -> None:
        """Begin to identify a model, as an encoder may have learned from its answers."""
        load = context.load
        may_be_encoder = self._name in (None, _ENCODER)
        if may_be_encoder and load is not None and load.files and load not in self._digests:
            self._digests[load] = begin_digest(load.files)

    def scorer_for(self, llama: Any) -> Scorer:
        """Return the scorer for a ``Llama``'s prompts, whose times it measures.

        Raises:
            ConfigError: An encoder is asked for, and none was trained.
        """
        return self._found(llama)[1]

    def name_for(self, llama: Any) -> str:
        """Return the name of that scorer."""
        return self._found(llama)[0]

    def identity_for(self, llama: Any) -> str:
        """Return a name of the scorer that is another one if an encoder was trained again."""
        name, scorer = self._found(llama)
        return f"{name} {scorer.identity}" if isinstance(scorer, EncoderScorer) else name

    def close(self) -> None:
        """Free the encoders."""
        with self._lock:
            for encoder in self._encoders.values():
                encoder.close()

    # -- inside ---------------------------------------------------------------------------------

    def _found(self, llama: Any) -> tuple[str, Scorer]:
        """Return the name of a scorer, and the scorer; an encoder may be trained at any time."""
        if self._name not in (None, _ENCODER):
            return self._name, self._own(llama, self._name)
        path = find_encoder(self._digest(llama))
        self._uses(llama, path)
        if path is not None:
            with self._lock:
                if (encoder := self._encoders.get(path)) is None:
                    encoder = self._encoders[path] = EncoderScorer(path)
            return _ENCODER, encoder
        if self._name == _ENCODER:
            raise ConfigError(
                f"found no trained encoder in {DIRECTORY}; `llmaas prompts learn` trains one, "
                "or set another `scorer`."
            )
        return _WITHOUT, self._own(llama, _WITHOUT)

    def _uses(self, llama: Any, path: Path | None) -> None:
        """Note which encoder a model uses; unload those that no model uses any more."""
        with self._lock:
            if self._paths.get(llama) == path:
                return
            self._paths[llama] = path
            used = set(self._paths.values())
            unused = [encoder for one, encoder in self._encoders.items() if one not in used]
        for encoder in unused:
            encoder.unload()  # not closed, as a thread may be about to use it

    def _own(self, llama: Any, name: str) -> Scorer:
        """Return a model's own scorer, which measures its times."""
        with self._lock:
            if (found := self._scorers.get(llama)) is None:
                found = self._scorers[llama] = SCORERS[name](self._natives)
            return found

    def _digest(self, llama: Any) -> str | None:
        """Return a model's digest; None as long as it is being computed, or if it is unknown."""
        native = self._natives.get(int(llama.ctx))
        digest = None if native is None or native.load is None else self._digests.get(native.load)
        with contextlib.suppress(StoreError):
            return None if digest is None else digest.get(0.0)
        return None
