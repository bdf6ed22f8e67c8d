"""Sockets on which the service listens, opened before the model is loaded."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

from llmaas_hooks import ConfigError
from llmaas_plugins.files.store_lock import folder_lock

__all__ = ["listening_on", "listening_on_port", "tls_context"]

_BACKLOG = 128
_PORTS = range(1 << 16)
_PROBE_S = 1.0


@contextlib.contextmanager
def listening_on_port(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Listen on every address of ``host``.

    Raises:
        ConfigError: The port is invalid, or listening fails.
    """
    if port not in _PORTS:  # larger numbers would wrap around to other ports
        raise ConfigError(f"--port must be from {_PORTS[0]} to {_PORTS[-1]}, found {port}")
    with contextlib.ExitStack() as stack:
        try:
            found = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            sockets = [
                stack.enter_context(listener)
                for family, _, _, _, address in dict.fromkeys(found)
                if (listener := _bound(family, address)) is not None
            ]
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(
                f"cannot listen on {host}, port {port}: {reason}. Try another --host or --port."
            ) from error
        if not sockets:
            raise ConfigError(f"{host} is not an address of this machine. Choose another --host.")
        yield sockets


def _bound(family: int, address: tuple[object, ...]) -> socket.socket | None:
    """Return a listening socket, or None if the machine has no such address."""
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # now, because until then another socket could bind the address
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def listening_on(path: Path) -> Iterator[list[socket.socket]]:
    """Listen on a Unix socket that only this user can reach, and remove it at the end.

    Raises:
        ConfigError: Other users can enter its directory, another file has its name, or another
            service listens on it.
    """
    path = _private(path)
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            with folder_lock(path.parent):  # else another service could remove the new socket
                _make_free(path)
                listener.bind(str(path))
                path.chmod(0o600)
                listener.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {path}: {error.strerror or error}. Choose another with --uds."
            ) from error
        ours = path.stat()
        try:
            yield [listener]
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(path.lstat(), ours):
                    path.unlink()


def _private(path: Path) -> Path:
    path = path.expanduser()
    directory = path.parent.resolve()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {directory}: {error.strerror}") from error
    if directory.stat().st_mode & 0o077:
        raise ConfigError(
            f"other users can enter {directory}. Put the socket into a directory with mode 0700, "
            f"e.g. `mkdir -m 700 {directory}/llmaas`."
        )
    return directory / path.name


def _make_free(path: Path) -> None:
    """Remove a socket that a dead service left, and refuse any other existing file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is not a socket. Choose another path with --uds.")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:  # any other error, such as a full backlog, means that a service is alive
            pass
    raise ConfigError(f"another service listens on {path}. Stop it, or choose another path.")


def tls_context(key: str | None, certificate: str | None) -> ssl.SSLContext | None:
    """Return the TLS settings for this key and certificate, or None if neither is given.

    Raises:
        ConfigError: The files cannot be used.
    """
    if key is None and certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate or "", key)
    except OSError as error:
        raise ConfigError(
            f"cannot use --ssl_certfile {certificate} with --ssl_keyfile {key}: {error}"
        ) from error
    return context
