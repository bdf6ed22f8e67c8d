"""The page's files: their headers, and what they may not contain; their figures, run by node."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from fastapi import FastAPI
from starlette.testclient import TestClient

from llmaas_hooks import MemoryClaim
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.memory.owners import owners
from llmaas_plugins.server import page
from llmaas_plugins.server.admission import Admission
from llmaas_plugins.server.application import explain_refusals
from llmaas_plugins.server.exchange import CALLER
from llmaas_plugins.server.metrics import Metrics
from llmaas_plugins.server.middleware import route_of
from llmaas_plugins.server.routes import make_router

FOLDER = Path(page.__file__).parent / "page_files"
NAMES = sorted(path.name for path in FOLDER.iterdir())
SCRIPTS = [name for name in NAMES if name.endswith(".mjs")]
PATHS = ["/", *(f"/page/{name}" for name in NAMES)]
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="there is no node; try `apt install nodejs`")

SCRAPE = r"""
# HELP llmaas_generated_tokens_total Tokens generated.
llmaas_generated_tokens_total 30.0
llmaas_first_token_seconds_count 2.0
llmaas_first_token_seconds_sum 0.5
llmaas_decode_seconds_total 4.0
llmaas_prompt_tokens_total 1000.0
llmaas_reused_tokens_total 250.0
process_resident_memory_bytes 1e+08
llmaas_kv_chunks_restored_tokens 1234.0
llmaas_elastic_tokens{key="0.5"} 100.0
llmaas_elastic_tokens{key="1.0"} 300.0
llmaas_deadlines_requests{key="met"} 7.0
llmaas_deadlines_requests{key="missed"} 3.0
llmaas_deadlines_requests{key="unexpected"} 1.0
odd{key="a \"b\" \\ \n}",other="c"} +Inf
"""


@pytest.fixture(scope="module")
def client():
    app = FastAPI()
    explain_refusals(app)
    app.include_router(page.make_page_router())
    return TestClient(app)


def run(expression):
    """Return the value of an expression in a module that has imported the figures."""
    code = f"""
import * as figures from {json.dumps((FOLDER / "metrics.mjs").as_uri())};
const metrics = figures.parse({json.dumps(SCRAPE)});
console.log(JSON.stringify({expression}));
"""
    command = [NODE, "--input-type=module", "--eval", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


# -- over HTTP ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_each_file_is_served_to_anyone(client, path):
    answer = client.get(path)
    name = path.rpartition("/")[2] or "index.html"
    assert (answer.status_code, answer.content) == (200, (FOLDER / name).read_bytes())
    assert answer.headers["content-type"].startswith("text/")
    assert (route_of(path)[0].name, route_of(path)[0].opens_to) == ("page", "anyone")
    head = client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == answer.headers["content-length"]


@pytest.mark.parametrize("path", PATHS)
def test_browsers_keep_a_file_until_it_changes(client, path):
    first = client.get(path).headers
    assert first["cache-control"] == "no-cache"
    for kept in (first["etag"], f'"other", W/{first["etag"]}', "*"):
        again = client.get(path, headers={"If-None-Match": kept})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first["etag"]
    assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_nothing_but_the_services_own_files_runs(client, path):
    headers = client.get(path).headers
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy.pop("default-src") == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect")} == {"'self'"}
    assert policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "set-cookie" not in headers


@pytest.mark.parametrize(
    "path", ["/page/", "/page/page.py", "/page/..%2Fpage.py", "/page/%2e%2e", "/page/a/b"]
)
def test_no_other_file_is_served(client, path):
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_files_are_only_read(client, method):
    answer = client.request(method, "/")
    assert (answer.status_code, answer.json()["status"]) == (405, 405)
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


# -- what the files contain --------------------------------------------------------------------


def test_the_page_has_no_code_or_style_inside():
    html = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script\b[^>]*>[^<]|<style|\sstyle=|\son\w+=|javascript:", html) == []
    linked = re.findall(r'(?:src|href)="([^"#]+)"', html)
    assert [name for name in linked if name != "data:,"] == ["page/page.css", "page/page.mjs"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_fetched_from_elsewhere(name):
    text = (FOLDER / name).read_text()
    assert set(re.findall(r"(?:https?:)?//[\w.]+", text)) <= {"http://www.w3.org"}  # SVG's name
    assert "@import" not in text
    assert "url(" not in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_texts_of_the_service_are_never_html(name):
    text = (FOLDER / name).read_text()
    forbidden = "innerHTML|outerHTML|insertAdjacentHTML|document.write|eval\\(|Function\\(|cookie"
    assert re.findall(forbidden + "|Storage|DOMParser|srcdoc", text) == []


@needs_node
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_javascript(name):
    subprocess.run([NODE, "--check", FOLDER / name], check=True, timeout=60)


# -- the figures -------------------------------------------------------------------------------


@needs_node
def test_a_scrape_is_parsed():
    values = "...['process_resident_memory_bytes', 'no_such'].map(n => figures.value(metrics, n))"
    odd = "metrics.get('odd')[0].labels, metrics.get('odd')[0].value > 1e300"
    resident, missing, labels, is_large, n = run(f"[{values}, {odd}, metrics.size]")
    assert (resident, missing, is_large) == (1e8, 0, True)
    assert labels == {"key": 'a "b" \\ \n}', "other": "c"}
    assert n == len({line.split("{")[0].split(" ")[0] for line in _samples()})


def _samples():
    return [line for line in SCRAPE.splitlines() if line and not line.startswith("#")]


@needs_node
def test_owners_in_an_order_that_does_not_change():
    owned = (("weights", 20, "needed"), ("drafts", 30, ""), ("", 5, "a plugin told no name"))
    claims = [MemoryClaim.reserved(*one) for one in owned]
    found = run(f"figures.memoryByOwner({json.dumps(owners(claims))})")
    names = [one["name"] for one in found]
    assert names == ["Mapped files", "The rest", "", "Drafts", "Weights"]
    assert [(one["bytes"], one["why"]) for one in found[3:]] == [(30, "needed"), (20, "needed")]
    assert {one["color"] for one in found[:2]} == {"lost", "c0"}


@needs_node
def test_promises_and_levels():
    found = run("figures.promises(metrics)")
    assert found == {"met": 7, "flagged": 2, "unflagged": 1, "unplanned": 0}
    assert run("figures.levels(metrics)") == [[1, 300], [0.5, 100]]
    assert run("figures.pluginsOn(metrics)") == ["kv_chunks", "elastic", "deadlines"]


@needs_node
def test_speeds():
    sample = "{time: 5, counters: figures.counters(metrics)}"
    later = (
        "{time: 15, counters: {generated: 51, firsts: 3, decodeS: 6, firstS: 1, prompt: 1100, "
        "reused: 300}}"
    )
    early = "{time: -40, counters: {generated: 0, prompt: 0, reused: 0}}"
    speeds = f"figures.speeds([{sample}]), figures.speeds([{sample}, {later}])"
    rates = f"figures.rates([{sample}, {later}]), figures.rates([{early}, {sample}, {later}])"
    first, second, found, longer = run(f"[{speeds}, {rates}]")
    assert first == {"writing": 7, "firstTokenS": 0.25}
    assert second == {"writing": 10, "firstTokenS": 0.5}
    assert found == {"written": 2.1, "read": 5}
    assert longer["written"] == 2.1


@needs_node
def test_savings_are_those_of_plugins_that_are_on():
    found = {one["name"]: (one["amount"], one["detail"]) for one in run("figures.savings(metrics)")}
    assert found["Prompt tokens not computed again"] == ("250", "25 % of 1,000")
    assert found["Tokens restored"][0] == "1,234"
    assert found["Elastic width not computed"] == ("13 %", "mean level 0.88 of 400 tokens")
    assert "Drafted tokens accepted" not in found
    assert "Weights not read from disk" not in found


@needs_node
def test_numbers_have_units():
    expected = {
        "bytes(0)": "0 B",
        "bytes(999)": "999 B",
        "bytes(999.6e3)": "1.00 MB",
        "bytes(12.34e9)": "12.3 GB",
        "count(1234567)": "1,234,567",
        "digits(0)": "0",
        "digits(9.996)": "10.0",
        "seconds(0.0437)": "44 ms",
        "seconds(61.2)": "61.2 s",
        "seconds(600)": "10 min",
        "share(1, 0)": "none",
        "share(1, 3)": "33 %",
        "share(1, 300)": "< 1 %",
        "ago(100, 102)": "now",
        "ago(100, 190)": "2 min ago",
    }
    found = run("[" + ", ".join(f"figures.{call}" for call in expected) + "]")
    assert dict(zip(expected, found, strict=True)) == expected


# -- what it reads -----------------------------------------------------------------------------


def test_reports_may_have_texts_that_are_no_unicode():
    """Plugins name files, and errors quote them."""
    odd = os.fsdecode(b"m\xff.gguf")
    service = SimpleNamespace(status=lambda: {"left": odd}, overview=lambda _: {"memory": odd})
    admission, app = Admission(ServiceConfig()), FastAPI()
    app.include_router(make_router(service, admission, Metrics(admission), None))

    async def called(scope, receive, send):
        await app({**scope, CALLER: ""}, receive, send)

    client = TestClient(called)
    assert client.get("/v1/llmaas/status").json()["left"] == odd
    assert client.get("/v1/llmaas/contexts").json()["memory"] == odd
