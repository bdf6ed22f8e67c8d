"""Pages in browsers: their own origins, host names of this server, and preflights."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from llmaas_plugins.server.origins import Visitors
from llmaas_plugins.server.refusal import Refusal


def admits(visitors, host, origin=None):
    headers = [(b"host", host.encode())]
    headers += [] if origin is None else [(b"origin", origin.encode())]
    try:
        visitors.check({"headers": headers})
    except Refusal as refusal:
        return refusal.status != 403
    return True


@pytest.mark.parametrize(
    "host",
    ["", "localhost:8000", "LocalHost", "localhost.:80", "127.0.0.1:80", "[::1]:80", "mail.lan:1"],
)
def test_names_of_the_service(host):
    assert admits(Visitors("mail.lan", (), ()), host)


@pytest.mark.parametrize(
    "host", ["rebound.example", "localhost.evil.example", "evil:8000", "192.0.2.1", "[::2]:80"]
)
def test_names_of_others(host):
    assert not admits(Visitors("localhost", (), ()), host)
    assert admits(Visitors("localhost", (host.partition(":")[0],), ()), host) != ("[" in host)


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", ""])
def test_any_address_of_a_machine_but_no_name(bound):
    visitors = Visitors(bound, (), ())
    assert admits(visitors, "192.0.2.1:8000")
    assert admits(visitors, "[2001:db8::1]:8000")
    assert not admits(visitors, "rebound.example:8000")


def test_origins():
    visitors = Visitors("localhost", (), ("https://Own.example",))
    assert admits(visitors, "localhost:8000", "http://localhost:8000")  # its own page, /docs
    assert admits(visitors, "localhost:8000", "https://own.example")
    for origin in (
        "https://evil.example",
        "http://localhost:3000",
        "null",
        "https://own.example.x",
    ):
        assert not admits(visitors, "localhost:8000", origin)


@pytest.mark.parametrize("bound", [None, "localhost"])
def test_an_origin_without_a_host_is_nobodys_own(bound):
    visitors = Visitors(bound, (), ())
    for origin in ("null", "https://", "https://evil.example"):
        assert not admits(visitors, "", origin)


def test_behind_a_socket_names_do_not_matter_but_origins_do():
    visitors = Visitors(None, (), ())
    assert admits(visitors, "any.example")
    assert admits(visitors, "any.example", "https://any.example")
    assert not admits(visitors, "any.example", "https://evil.example")
