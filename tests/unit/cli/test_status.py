"""``llmaas status``: what it says if no service of this suite answers, or the key is wrong.

``tests/integration/server`` asks real services.
"""

from __future__ import annotations

import http.server
import json
import threading

import pytest
from commands import mistake

from llmaas_plugins.cli.main import main

LONG = "x" * 300


@pytest.fixture
def answering():
    """Return a function that starts a server with one answer, and returns its address."""
    servers = []

    def answering(code, content):
        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                assert self.path == "/v1/llmaas/status"
                self.send_response(code)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield answering
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def error(capsys):
    """Return a function that asks with options, and returns the error."""

    def error(*options):
        said = mistake(capsys, ["status", *map(str, options)])
        return said.removeprefix("llmaas: error: ")

    return error


def test_no_service_is_there(tmp_path, error):
    for options in (("--url", "http://127.0.0.1:1"), ("--uds", tmp_path / "none")):
        assert "no service listens at " in (said := error(*options))
        assert said.endswith("Start one with `llmaas serve`.")
    assert error("--uds", tmp_path / LONG).startswith(f"unix:{tmp_path}/xxx")


@pytest.mark.parametrize(
    "address", ["127.0.0.1:8000", "http://[", "http://127.0.0.1:x", "http://a b", f"http://{LONG}"]
)
def test_no_address(error, address):
    assert "address" in error("--url", address)


@pytest.mark.parametrize(
    ("code", "content"),
    [
        *((404, b"Not Found"), (200, b"<html>"), (200, b"\xff"), (200, b"[]"), (200, b'{"a": 1}')),
        (200, b'{"queue": 0, "plugins": {}}'),
        (200, b'{"queue": 0, "memory": {}, "plugins": [], "errors": {}}'),
    ],
)
def test_another_server(answering, error, code, content):
    address = answering(code, content)
    assert error("--url", address).startswith(f"{address} is not the address of `llmaas serve`: ")


def test_a_key_that_is_refused(answering, error, monkeypatch):
    address = answering(401, b'{"detail": "Invalid API key"}')
    monkeypatch.setenv("KEY", "wrong")
    said = error("--url", address, "--key-env", "KEY")
    assert said.startswith("Invalid API key (HTTP 401); --key-env NAME names the variable")
    monkeypatch.setenv("KEY", " ")
    for variable in ("KEY", "sesame"):
        said = error("--url", address, "--key-env", variable)
        assert said == "the variable that --key-env names is not set. Set it to the key."
    monkeypatch.setenv("KEY", "my key")
    assert "must contain printable ASCII" in error("--url", address, "--key-env", "KEY")


@pytest.mark.parametrize(
    ("found", "line"), [(5, "left_alone=5"), (["old"], "left alone: old"), ({}, ""), ([], "")]
)
def test_plugins_may_report_anything(answering, capsys, found, line):
    """Reports of third-party plugins are any JSON, also under names that ours use."""
    memory = {"resident_bytes": 1 << 20, "budget": None, "owners": []}
    report = {"queue": 0, "memory": memory, "plugins": {"p": {"left_alone": found}}, "errors": {}}
    assert main(["status", "--url", answering(200, json.dumps(report).encode())]) == 0
    _, _, said = capsys.readouterr().out.partition("[p]\n")
    assert said.strip() == line
