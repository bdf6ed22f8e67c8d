"""Pages in browsers: their own origins, host names of this server, and preflights."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from llmaas_plugins.server.origins import OriginCheck
from llmaas_plugins.server.refusal import Refusal


def admits(origins, host, origin=None):
    headers = [(b"host", host.encode())]
    headers += [] if origin is None else [(b"origin", origin.encode())]
    try:
        origins.check({"headers": headers})
    except Refusal as refusal:
        return refusal.status != 403
    return True


@pytest.mark.parametrize(
    "host",
    ["", "localhost:8000", "LocalHost", "localhost.:80", "127.0.0.1:80", "[::1]:80", "mail.lan:1"],
)
def test_names_of_the_service(host):
    assert admits(OriginCheck("mail.lan", (), ()), host)


@pytest.mark.parametrize(
    "host", ["rebound.example", "localhost.evil.example", "evil:8000", "192.0.2.1", "[::2]:80"]
)
def test_names_of_others(host):
    assert not admits(OriginCheck("localhost", (), ()), host)
    assert admits(OriginCheck("localhost", (host.partition(":")[0],), ()), host) != ("[" in host)


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", ""])
def test_any_address_of_a_machine_but_no_name(bound):
    origins = OriginCheck(bound, (), ())
    assert admits(origins, "192.0.2.1:8000")
    assert admits(origins, "[2001:db8::1]:8000")
    assert not admits(origins, "rebound.example:8000")


def test_origins():
    origins = OriginCheck("localhost", (), ("https://Own.example",))
    assert admits(origins, "localhost:8000", "http://localhost:8000")  # its own page, /docs
    assert admits(origins, "localhost:8000", "https://own.example")
    for origin in (
        "https://evil.example",
        "http://localhost:3000",
        "null",
        "https://own.example.x",
    ):
        assert not admits(origins, "localhost:8000", origin)


@pytest.mark.parametrize("bound", [None, "localhost"])
def test_an_origin_without_a_host_is_nobodys_own(bound):
    origins = OriginCheck(bound, (), ())
    for origin in ("null", "https://", "https://evil.example"):
        assert not admits(origins, "", origin)


def test_behind_a_socket_names_do_not_matter_but_origins_do():
    origins = OriginCheck(None, (), ())
    assert admits(origins, "any.example")
    assert admits(origins, "any.example", "https://any.example")
    assert not admits(origins, "any.example", "https://evil.example")
