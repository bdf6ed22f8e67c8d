"""Python processes forked from a server that has imported the suite, so that they start at once.

To import llama_cpp, numpy and the suite takes a second of processor time in each new interpreter.
``run`` and ``Process`` are those of ``subprocess``, for commands that begin with this Python. Use
``subprocess`` where a test is about the start of an interpreter: its imports, its memory, signals
that come while it starts, a preloaded library, variables that are read by imports.

Each worker of the tests has its own server, which starts with the first process and ends with the
worker. It has no threads, and it has not used llama.cpp. The processes end as others do: the
interpreter waits for threads, calls what is registered with ``atexit`` and frees its modules, but
for those of other projects and of Python: to free these would copy all of their pages.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path
from types import ModuleType

COMMANDS = (
    *("datastore", "deadlines", "demo", "doctor", "elastic", "flash", "plugins", "prompts", "run"),
    *("serve", "setup", "store", "tune"),
)
MODULES = (
    "llama_cpp",
    "llmaas_plugins.activation",
    "llmaas_plugins.kv_chunks.plugin",
    "llmaas_plugins.kv_chunks.plugin_counters",
    "llmaas_plugins.kv_chunks.transfer.transfer",
    "llmaas_plugins.service.service",
    *(f"llmaas_plugins.cli.{command}" for command in COMMANDS),
)
SERVER_MODULES = (
    "llama_cpp.server.cli",
    "anyio._backends._asyncio",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
)
OWN = ("llmaas_", "llama_cpp", "__main__")
_MOST_BYTES = 1 << 20
_kept = []


class Process(subprocess.Popen):
    """A process like those of ``subprocess``.

    It is a child of the server. This class therefore replaces the methods of CPython's ``Popen``
    that start a child and that wait for it.
    """

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):  # noqa: PLR0917
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[3:9]
        python, *command = map(str, args)
        assert (python, preexec_fn, pass_fds) == (sys.executable, None, ())
        job = {
            "command": command,
            "cwd": str(Path.cwd() if cwd is None else Path(cwd).absolute()),
            "environ": dict(os.environ if env is None else env),
            "has_session": rest[-2],
        }
        theirs = [
            number if fd == -1 else fd for number, fd in enumerate((p2cread, c2pwrite, errwrite))
        ]
        try:
            self.pid = _server().ask(job, theirs)
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        self._child_created = True

    def __exit__(self, kind, *error):
        """Wait for the end; after an error in the block, kill the process."""
        if kind is not None:
            self.kill()
        super().__exit__(kind, *error)

    def _internal_poll(self, **_):
        with suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _try_wait(self, wait_flags):
        if wait_flags != os.WNOHANG:
            waiting = select.poll()
            fd = os.pidfd_open(self.pid)
            waiting.register(fd, select.POLLIN)
            waiting.poll()
            os.close(fd)
        return _server().ask({"ended": self.pid})


def run(command, *, timeout=120, check=False, capture_output=False, **options):
    """Run a command to its end, as ``subprocess.run`` does."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Process(command, **options) as process:
        stdout, stderr = process.communicate(timeout=timeout)
    done = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    return done


# -- the server -----------------------------------------------------------------------------------


@functools.cache
def _server():
    return _Server()


class _Server:
    """The connection to the server of this process."""

    def __init__(self):
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # numpy would start threads
        environ.pop("PYTHONPATH", None)  # each process has its own
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=environ,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        atexit.register(self._end)

    def ask(self, request, fds=()):
        """Send a request with these files, and return the answer."""
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(request).encode()], fds)
            answer = self._connection.recv(_MOST_BYTES)
        assert answer, "the fork server has ended"
        return json.loads(answer)

    def _end(self):
        self._connection.close()
        self._process.wait()


def main(fd):
    """Serve until the other end of the connection is closed. A forked process becomes its job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal
    del sys.path[0]  # the folder of this file
    atexit.register(_keep_modules)  # the first one is called last
    _import()
    _kept.extend(name for name in sys.modules if not name.startswith(OWN))
    assert len(list(Path("/proc/self/task").iterdir())) == 1  # a fork has no other threads
    gc.collect()
    gc.freeze()  # collections in the forked processes would copy all pages
    with closing(socket.socket(fileno=fd)) as connection:
        job = _serve(connection)
    if job is not None:
        _become(job)


def _import():
    from llmaas_plugins.server import import_server

    import_server()
    has_server = "llmaas_plugins.server.upstream" in sys.modules
    for name in (*MODULES, *(SERVER_MODULES if has_server else ())):
        importlib.import_module(name)


def _keep_modules():
    """Take modules from the interpreter, which would free them at its end."""
    modules = [sys.modules.pop(name, None) for name in _kept]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))


def _serve(connection):
    """Answer requests; return None at the end, and in each forked process its job."""
    children = set()
    while True:
        content, fds, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
        if not content:
            break
        request = json.loads(content)
        if fds:
            pid = os.fork()
            if pid == 0:
                for number, fd in enumerate(fds):
                    os.dup2(fd, number)
                    os.close(fd)
                if request["has_session"]:
                    os.setsid()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                connection.send(json.dumps(os.getpid()).encode())  # now it can take signals
                return request
            children.add(pid)
            for fd in fds:
                os.close(fd)
        else:
            answer = os.waitpid(request["ended"], os.WNOHANG)
            children.discard(answer[0])
            connection.send(json.dumps(answer).encode())
    for pid in children:  # no test waits for them any more
        os.kill(pid, signal.SIGKILL)
    return None


def _become(job):
    """Do what a new interpreter does with this command."""
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environ"])
    sys.stdout.reconfigure(line_buffering=bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.modules["__main__"] = module = ModuleType("__main__")
    is_safe = job["command"][0] == "-P"  # without the current folder among the paths
    how, what, *sys.argv[1:] = job["command"][is_safe:]
    sys.orig_argv = [sys.executable, *job["command"]]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = [] if is_safe else [job["cwd"] if how == "-m" else ""]
    sys.path[:0] = [*own, *filter(None, paths)]
    if how == "-m":
        runpy._run_module_as_main(what)  # what the interpreter itself calls for `-m`
    else:
        assert how == "-c"
        sys.argv[0] = how
        exec(compile(what, "<string>", "exec"), module.__dict__)


if __name__ == "__main__":
    main(int(sys.argv[1]))
