"""An app in an environment that refuses common facilities; prints its results as JSON.

Run as a script: ``confined.py MODEL STORE REFUSED``, where REFUSED joins names of ``REFUSALS``
with commas.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import resource
import struct
import sys
from pathlib import Path

_CALLS = {"fallocate": 285, "mincore": 27, "io_uring_setup": 425, "io_uring_enter": 426}
"""System call numbers on x86-64."""
_OPENAT, _FLAGS_AT = 257, 32
_LOAD, _AND, _IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NO_NEW_PRIVILEGES, _SECCOMP = 38, 22
_NEW_MOUNTS, _PRIVATE_BELOW = 0x20000, 0x44000

lines = []


class Lines(logging.Handler):
    """Log handler that keeps the suite's messages."""

    def emit(self, record):
        if record.name.startswith("llmaas"):
            lines.append(f"{record.levelname} {record.getMessage()}")


def refuse_calls(errors, *, is_direct_refused=False):
    """Make system calls fail from now on, as a container's seccomp filter does."""
    program = [(_LOAD, 0, 0, 0)]
    for name, error in errors.items():
        program += [(_IF_EQUAL, 0, 1, _CALLS[name]), (_RETURN, 0, 0, _ERRNO | error)]
    if is_direct_refused:
        program += [
            (_IF_EQUAL, 0, 4, _OPENAT),
            (_LOAD, 0, 0, _FLAGS_AT),
            (_AND, 0, 0, os.O_DIRECT),
            (_IF_EQUAL, 1, 0, 0),
            (_RETURN, 0, 0, _ERRNO | errno.EINVAL),
        ]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = b"".join(struct.pack("HBBI", *step) for step in program)
    filters = ctypes.create_string_buffer(code)
    described = struct.pack("HxxxxxxP", len(program), ctypes.addressof(filters))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SECCOMP, 2, described):
        raise OSError(ctypes.get_errno(), "seccomp")


def hide_proc():
    """Mount an empty folder over /proc for this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    private = libc.unshare(_NEW_MOUNTS) or libc.mount(b"none", b"/", None, _PRIVATE_BELOW, None)
    if private or libc.mount(b"none", b"/proc", b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "mount")


def limit(what, most):
    """Lower a resource limit permanently."""
    resource.setrlimit(what, (most, most))


REFUSALS = {
    "proc": hide_proc,
    "memlock": lambda: limit(resource.RLIMIT_MEMLOCK, 0),
    "files": lambda: limit(resource.RLIMIT_NOFILE, 48),
    "processors": lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]),
    "io_uring": lambda: refuse_calls(
        {"io_uring_setup": errno.EPERM, "io_uring_enter": errno.EPERM}
    ),
    "holes": lambda: refuse_calls({"fallocate": errno.EOPNOTSUPP}),
    "mincore": lambda: refuse_calls({"mincore": errno.ENOSYS}),
    "direct": lambda: refuse_calls({}, is_direct_refused=True),
}


def streamed(path):
    """Return a model's greedy tokens, once from memory and once with weights read from the file."""
    from llama_cpp import Llama

    from llmaas_plugins import activate
    from llmaas_plugins._native import read_rate
    from llmaas_plugins.machine import resident_bytes

    def answer(suite=None):
        llama = Llama(path, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
        with contextlib.closing(llama):
            tokens = llama.generate(list(range(300, 320)), temp=0.0)
            found = [next(tokens) for _ in range(8)]
            return found, suite and suite.status()["plugins"]["flash_weights"]["models"]

    expected, _ = answer()
    budget = resident_bytes() + (60 << 20)
    table = {"memory_budget": budget, "arena": 8 << 20}
    with activate({"on_error": "raise", "plugins": {"flash_weights": table}}) as suite:
        found, models = answer(suite)
    return {"same": found == expected, "models": models, "rate": read_rate(Path(path), seconds=0.1)}


def restored(store):
    """Run a conversation in two lives; return it and the number of restored tokens."""

    from llama_cpp import Llama
    from switching import OTHER, PROMPT, ask

    from llmaas_plugins import activate
    from llmaas_plugins.reference_model import reference_model_path

    def lived():
        llama = Llama(
            str(reference_model_path()), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False
        )
        with contextlib.closing(llama):
            return [ask(llama, prompt, 4)[0] for prompt in (PROMPT, OTHER, PROMPT)]

    expected, found, n_restored = lived(), [], []
    table = {"store": store, "codec": "lossless", "ram_budget": 1 << 20}
    for _ in range(2):
        with activate({"on_error": "raise", "plugins": {"kv_chunks": table}}) as suite:
            found.append(lived())
            suite.settle()
            n_restored.append(suite.status()["plugins"]["kv_chunks"]["restored_tokens"])
    return {"same": found == [expected, expected], "restored": n_restored}


def erased(store):
    """Return the bytes in the middle of a file after it was erased."""
    from llmaas_plugins import _native

    path = Path(store).with_suffix(".bytes")
    path.write_bytes(b"x" * 12288)
    fd = os.open(path, os.O_RDWR)
    _native.store_erase(fd, [4096], [4096])
    os.close(fd)
    content = path.read_bytes()
    return content[:4096] + content[8192:] == b"x" * 8192 and not content[4096:8192].strip(b"\0")


def main(path, store, refused):
    """Confine this process, then run the app."""
    logging.getLogger().addHandler(Lines())
    sys.stdout.flush()
    import llama_cpp  # noqa: F401  before /proc is gone, as an app does

    from llmaas_plugins.machine import available_bytes, total_bytes, usable_processors

    for name in filter(None, refused.split(",")):
        try:
            REFUSALS[name]()
        except PermissionError as error:
            sys.stdout.write(json.dumps({"skipped": f"{name}: {error}"}))
            return
    said = {"streamed": streamed(path), "restored": restored(store), "erased": erased(store)}
    said |= {"total": total_bytes(), "available": available_bytes()}
    sys.stdout.write(json.dumps(said | {"processors": usable_processors(), "lines": lines}))


if __name__ == "__main__":
    main(*sys.argv[1:])
