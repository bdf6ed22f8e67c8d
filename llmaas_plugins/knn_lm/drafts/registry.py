"""Drafts for the running app's engines, kept in step with the archive."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Engine, StoreError, forks
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.files import segment_files
from llmaas_plugins.knn_lm.archive.fingerprint import fingerprint
from llmaas_plugins.knn_lm.drafts.draft_model import DatastoreDraft
from llmaas_plugins.knn_lm.drafts.requirements import most_tokens, obstacle

__all__ = ["DraftRegistry"]

_log = logging.getLogger("llmaas.knn_lm")


_Drafts = dict[str | None, DatastoreDraft | None]
"""Drafts of one engine by app; None is the draft for all apps without chats of their own."""


class DraftRegistry:
    """Manager of the draft models of all engines that support drafts.

    An app is proposed continuations from its own chats, and from those that belong to no app.

    Attributes:
        n_bytes: Memory of all drafts in bytes, as of the last request. To read it takes no lock,
            which may be held while drafts are made.
    """

    def __init__(self, store: Path, *, shares: bool) -> None:
        """Start without drafts.

        Args:
            store: Directory of the datastore.
            shares: Whether every app may be proposed continuations from every app's chats.
        """
        self._store = store
        self._shares = shares
        self._lock = forks.lock()
        self._drafts: weakref.WeakKeyDictionary[Engine, _Drafts] = weakref.WeakKeyDictionary()
        self._warned: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._owners: dict[bytes, str | None] = {}
        self._seen_files: list[tuple[str, int]] | None = None
        self.n_bytes = 0

    def drafter(self, engine: Engine, app: str | None) -> DatastoreDraft | None:
        """Return the app's drafts for a request; None if there are none.

        Raises:
            StoreError: The archive is damaged, or belongs to another model.
        """
        with self._lock:  # several engines' threads call this
            files = _files(self._store)
            if not files and not self._owners:
                return None  # nothing has been built yet
            if engine.load is None:  # the file at the model's path may have been replaced
                self._warn_once(
                    engine, "its model was loaded before the activation, or trained since"
                )
                return None
            if files != self._seen_files:
                self._update(engine)
                self._seen_files = files
            key = app if app in self._owners.values() else None
            drafts = self._drafts.setdefault(engine, {})
            if key not in drafts:
                drafts[key] = self._made(engine, key)
            draft = drafts[key]
            self.n_bytes = sum(one.n_bytes for one in self._all())
        if draft is not None:
            draft.begin()
        return draft

    def stats(self) -> dict[str, int]:
        """Return the tokens proposed and accepted so far, and the drafts' memory in bytes."""
        drafts = self._all()
        return {
            "proposed": sum(draft.counts.proposed for draft in drafts),
            "accepted": sum(draft.counts.accepted for draft in drafts),
            "draft_bytes": sum(draft.n_bytes for draft in drafts),
        }

    def close(self) -> None:
        """Forget all drafts."""
        with self._lock:
            self._drafts.clear()
            self.n_bytes = 0

    def _all(self) -> list[DatastoreDraft]:
        with self._lock:
            found = [draft for drafts in self._drafts.values() for draft in drafts.values()]
        return [draft for draft in found if draft is not None]

    def _update(self, engine: Engine) -> None:
        """Add new conversations to the drafts; start over if any was forgotten."""
        with self._opened(engine) as archive:
            ids, known = archive.ids(), list(self._owners)
            if ids[: len(known)] != known:
                self.close()
                self._owners.clear()
            for id_ in ids[len(self._owners) :]:
                owner = None if self._shares else archive.owner(id_)
                self._add_text(archive.tokens(id_), owner)
                self._owners[id_] = owner

    def _add_text(self, tokens: NDArray[np.int32], owner: str | None) -> None:
        for drafts in self._drafts.values():
            for app, draft in drafts.items():
                if draft is not None and owner in (None, app):
                    draft.update(tokens)

    def _made(self, engine: Engine, app: str | None) -> DatastoreDraft | None:
        with self._opened(engine) as archive:
            ids = [id_ for id_, owner in self._owners.items() if owner in (None, app)]
            draft = DatastoreDraft(archive.tokens(id_) for id_ in ids)
        if reason := obstacle(engine.llama, draft):
            self._warn_once(engine, f"no drafts: {reason}")
            return None
        draft.n_ctx = most_tokens(engine.llama)
        return draft

    def _warn_once(self, engine: Engine, reason: str) -> None:
        """Log once why an engine gets no proposals."""
        if engine not in self._warned:
            self._warned.add(engine)
            name = Path(engine.llama.model_path).name
            _log.warning("knn_lm proposes nothing for %s: %s", name, reason)

    def _opened(self, engine: Engine) -> Archive:
        archive = Archive.open(self._store)
        found = archive.binding
        if found is not None and found.fingerprint != fingerprint(engine.llama, engine.load):
            archive.close()
            raise StoreError(
                f"the conversations in {self._store} were tokenized for another model. Set "
                "plugins.knn_lm.store to another directory, or build one for this model there."
            )
        return archive


def _files(store: Path) -> list[tuple[str, int]]:
    """Return names and sizes of the segments, which differ if the archive changed."""
    try:
        paths = [store / str(name) for name in segment_files(store)[0]]
        return [(path.name, path.stat().st_size) for path in paths]
    except OSError:
        return []
