"""The command ``llmaas``: entry point and exit status.

Exit status 0: success; 1: the command found a problem; 2: it could not do what was asked; 130 and
143: Ctrl-C and SIGTERM; 141: the reader of its output went away. ``llmaas run`` exits with the
status of the script, but with 130 after a Ctrl-C that the script does not handle. Python itself
would end by SIGINT, for which shells show 130, too.
"""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

from llmaas_plugins.cli.interrupts import Stopped, close_stdout, give_signals_back, take_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_FAILED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``llmaas`` with ``argv`` (the process's own by default) and return its exit status."""
    take_signals()
    try:
        status = _command(argv)
    except KeyboardInterrupt as error:
        return _stopped(error, is_alone=argv is None)
    except BrokenPipeError:  # the reader, such as `| head`, closed the pipe
        close_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        return _refused(error)
    except MemoryError:
        return _failed("out of memory. Close other programs, or give the command smaller files.")
    except Exception:
        number = give_signals_back()
        if number is None:
            raise
        return _stopped(Stopped(number), is_alone=argv is None)  # the signal caused the error
    finally:
        give_signals_back()
    return status


def _command(argv: Sequence[str] | None) -> int:
    from llmaas_plugins.cli.commands import run_command  # slow import, which a signal may stop

    try:
        return run_command(argv)
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()  # the interpreter would report a failure with a traceback


def _stopped(error: KeyboardInterrupt, *, is_alone: bool) -> int:
    if is_alone:  # a second Ctrl-C ends the process at once
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    stopped = error if isinstance(error, Stopped) else Stopped(signal.SIGINT)
    _say(f"stopped; {stopped.then}" if stopped.then else "stopped")
    return stopped.status


def _refused(error: OSError) -> int:
    """Print an error of the operating system that no command expected, and drop pending output."""
    where = f"{error.filename}: " if error.filename is not None else ""
    return _failed(f"{where}{error.strerror or error}")


def _failed(message: str) -> int:
    _say(f"error: {message}")
    close_stdout()
    return _FAILED


def _say(text: str) -> None:
    if sys.stderr is not None:
        print(f"llmaas: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
