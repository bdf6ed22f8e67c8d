"""Ctrl-C at every place of a module in turn."""

from __future__ import annotations

import itertools
import signal
import sys


def interruptions(*modules, least=5, step=1, **options):
    """Yield an interruption at the next line of modules, until one does not come.

    Use each in a ``with`` block. More than ``least`` lines must run.
    """
    for n in itertools.count(1, step):
        interruption = Interruption(n, *modules, **options)
        yield interruption
        if not interruption.came:
            assert n > least
            return


class Interruption:
    """Block in which Ctrl-C comes before the ``n``-th line that runs in some modules.

    It is a real signal, so code can delay it. The block catches the ``KeyboardInterrupt``. Returns
    of functions count as lines.

    Attributes:
        where: Function and line of the interruption; None before it comes.
    """

    def __init__(self, n, *modules, handler=signal.default_int_handler):
        self._left = n
        self._files = {module.__file__ for module in modules}
        self._handler = handler
        self._former = None
        self.where = None

    @property
    def came(self):
        """Whether so many lines ran in the block."""
        return self.where is not None

    def __enter__(self):
        self._former = sys.gettrace(), signal.signal(signal.SIGINT, self._handler)
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind, error, trace):
        former, handler = self._former
        sys.settrace(former)
        signal.signal(signal.SIGINT, handler)
        return kind is KeyboardInterrupt and self.came

    def _trace(self, frame, event, _):
        if frame.f_code.co_filename not in self._files:
            return None
        if event in {"line", "return"}:
            self._left -= 1
            if self._left == 0:
                self.where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self._trace
