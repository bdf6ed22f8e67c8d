"""Drafts for engines of the running app, from what is in the archive now."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from pathlib import Path

from llmaas_hooks import Engine, StoreError
from llmaas_plugins.knn_lm.archive import Archive
from llmaas_plugins.knn_lm.archive_files import segment_files
from llmaas_plugins.knn_lm.drafting import attach
from llmaas_plugins.knn_lm.drafts import DatastoreDraft
from llmaas_plugins.knn_lm.fingerprint import fingerprint

__all__ = ["Proposer"]

_log = logging.getLogger("llmaas.knn_lm")


class Proposer:
    """Puts a draft model on each engine that can have one, and keeps it up to date."""

    def __init__(self, store: Path) -> None:
        """Nothing is read yet."""
        self._store = store
        self._lock = threading.RLock()
        self._drafts: weakref.WeakKeyDictionary[Engine, DatastoreDraft | None] = (
            weakref.WeakKeyDictionary()
        )
        self._ids: list[bytes] = []
        self._looked_at: list[tuple[str, int]] | None = None

    def begin(self, engine: Engine, *, is_on: bool) -> None:
        """A request begins: propose for it, or leave it alone.

        Raises:
            StoreError: The archive is damaged, or of another model.
        """
        with self._lock:  # several engines' threads
            self._begin(engine, is_on=is_on)

    def _begin(self, engine: Engine, *, is_on: bool) -> None:
        files = _files(self._store)
        if not files and not self._ids:
            return  # nothing has been built yet
        if files != self._looked_at:
            self._follow(engine)
            self._looked_at = files
        if engine not in self._drafts:
            self._drafts[engine] = self._attached(engine)
            self.end(engine)
        draft = self._drafts[engine]
        if is_on and draft is not None and engine.llama.draft_model is None:
            engine.llama.draft_model = draft

    def end(self, engine: Engine) -> None:
        """The request is over: what the app evaluates itself needs no rows of logits for drafts."""
        with self._lock:
            draft = self._drafts.get(engine)
        with contextlib.suppress(ReferenceError):  # the engine may be gone
            if draft is not None and engine.llama.draft_model is draft:
                engine.llama.draft_model = None

    def stats(self) -> dict[str, int]:
        """Tokens proposed and accepted so far, and memory taken."""
        with self._lock:
            drafts = [draft for draft in self._drafts.values() if draft is not None]
        return {
            "proposed": sum(draft.counts.proposed for draft in drafts),
            "accepted": sum(draft.counts.accepted for draft in drafts),
            "draft_bytes": sum(draft.n_bytes for draft in drafts),
        }

    def close(self) -> None:
        """Take the draft models off."""
        with self._lock:
            for engine in list(self._drafts):
                self.end(engine)
            self._drafts.clear()

    def _follow(self, engine: Engine) -> None:
        """Take in what was added; start anew when anything was forgotten."""
        with self._opened(engine) as archive:
            ids = archive.ids()
            if ids[: len(self._ids)] == self._ids:
                for draft in filter(None, self._drafts.values()):
                    for id_ in ids[len(self._ids) :]:
                        draft.update(archive.tokens(id_))
            else:
                self.close()
        self._ids = ids

    def _attached(self, engine: Engine) -> DatastoreDraft | None:
        llama = engine.llama
        with self._opened(engine) as archive:
            draft = DatastoreDraft(archive.token_sequences())
        try:
            attach(llama, draft)
        except ValueError as error:
            _log.warning("knn_lm proposes nothing for %s: %s", Path(llama.model_path).name, error)
            return None
        return draft

    def _opened(self, engine: Engine) -> Archive:
        archive = Archive.open(self._store)
        found = archive.binding
        if found is not None and found.fingerprint != fingerprint(engine.llama, engine.load):
            archive.close()
            raise StoreError(
                f"the conversations in {self._store} are tokens of another model. Set "
                "plugins.knn_lm.store to another directory, or build one for this model there."
            )
        return archive


def _files(store: Path) -> list[tuple[str, int]]:
    """What tells that the archive changed."""
    try:
        paths = [store / str(name) for name in segment_files(store)[0]]
        return [(path.name, path.stat().st_size) for path in paths]
    except OSError:
        return []
