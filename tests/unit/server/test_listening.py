"""Where a service listens, and who owns its state folder: checked before a model is loaded."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading

import pytest

from llmaas_hooks import ConfigError
from llmaas_plugins.server.client import LLMClient
from llmaas_plugins.server.listening import (
    listening_on,
    listening_on_port,
    tls_context,
)


@pytest.fixture
def path(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path / "service.sock"


def test_a_socket_is_private_and_removed_at_the_end(path):
    with listening_on(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()


@pytest.mark.parametrize("kind", ["file", "directory", "link to a file"])
def test_what_is_no_socket_is_left_alone(path, kind):
    if kind == "directory":
        path.mkdir()
    else:
        (path if kind == "file" else path.with_name("target")).write_text("precious")
    if kind == "link to a file":
        path.symlink_to("target")
    with pytest.raises(ConfigError, match="exists and is not a socket"), listening_on(path):
        pass
    if kind != "directory":
        assert path.read_text() == "precious"


def test_one_that_somebody_listens_on_is_left_alone(path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(0)
        with contextlib.ExitStack() as stack:
            for _ in range(3):  # its queue is full
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect_ex(str(path))
            with pytest.raises(ConfigError, match="another service listens"), listening_on(path):
                pass
        assert path.is_socket()


def test_one_that_was_left_is_replaced(path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
    with listening_on(path) as (listener,), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        listener.accept()[0].close()


def test_of_two_that_come_at_once_one_replaces_it(path, monkeypatch):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
    both_remove, one_listens, may_end = threading.Barrier(2), threading.Event(), threading.Event()
    unlink, refusals = type(path).unlink, []

    def removing(path, missing_ok=False):
        with contextlib.suppress(threading.BrokenBarrierError):
            if both_remove.wait(0.2):
                one_listens.wait(5)
        unlink(path, missing_ok)

    def serve():
        try:
            with listening_on(path):
                one_listens.set()
                may_end.wait(5)
        except ConfigError as error:
            refusals.append(str(error))
            may_end.set()

    monkeypatch.setattr(type(path), "unlink", removing)
    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert refusals == [f"another service listens on {path}. Stop it, or choose another path."]


def test_what_came_in_its_place_is_not_removed(path):
    with listening_on(path):
        path.unlink()
        path.write_text("new")
    assert path.read_text() == "new"


def test_a_path_that_is_too_long(path):
    with (
        pytest.raises(ConfigError, match="cannot listen on"),
        listening_on(path.with_name("x" * 200)),
    ):
        pass


def test_a_port_is_for_one():
    with listening_on_port("127.0.0.1", 0) as (first,):
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}: .*in use"):
            listening_on_port("127.0.0.1", port).__enter__()
    with listening_on_port("127.0.0.1", port) as (again,):
        assert again.getsockname()[1] == port


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 99999), ("127.0.0.1", -1), ("x" * 300, 80), ("192.0.2.1", 0)]
)
def test_addresses_that_there_are_not(host, port):
    with pytest.raises(ConfigError, match=r"--host|--port"):
        listening_on_port(host, port).__enter__()


def test_certificates(tmp_path):
    assert tls_context(None, None) is None
    for key in (None, str(tmp_path / "none.pem"), os.devnull):
        with pytest.raises(ConfigError, match="--ssl_certfile"):
            tls_context(key, str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match="--ssl_certfile"):
        tls_context(os.devnull, None)


def test_addresses_are_in_the_form_that_clients_take(tmp_path):
    pytest.importorskip("uvicorn")
    from llmaas_plugins.server.http_server import _address

    with listening_on_port("127.0.0.1", 0) as (listener,):
        port = listener.getsockname()[1]
        assert _address(listener, is_tls=False) == f"http://127.0.0.1:{port}"
        assert _address(listener, is_tls=True) == f"https://127.0.0.1:{port}"
    tmp_path.chmod(0o700)
    with listening_on(tmp_path / "s") as (listener,):
        assert _address(listener, is_tls=False) == f"unix:{tmp_path / 's'}"


@pytest.mark.parametrize("kind", ["http", "unix"])
def test_a_client_without_a_service_names_the_next_step(tmp_path, kind):
    address = f"unix:{tmp_path / 's'}"
    if kind == "http":
        with socket.socket() as taken:  # bound, but not listening
            taken.bind(("127.0.0.1", 0))
            address = f"http://127.0.0.1:{taken.getsockname()[1]}"
            _no_service(address)
    else:
        _no_service(address)


def _no_service(address):
    with pytest.raises(OSError, match="Start one with `llmaas serve`") as caught:
        LLMClient(address).status()
    assert str(caught.value).startswith(f"no service listens at {address}.")
