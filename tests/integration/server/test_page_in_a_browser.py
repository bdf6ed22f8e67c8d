"""The page in Debian's Chromium: it loads, updates, and says so if something is wrong."""

from __future__ import annotations

import pytest
from browsing import browsing, needs_chromium
from limited import ADMINISTRATOR, MAIL, limited
from served import CONFIG, launched, serving

from llmaas_plugins.server.client import LLMClient

pytest.importorskip("fastapi")
pytestmark = [pytest.mark.slow, needs_chromium]

SHORT = {"temperature": 0.0, "max_tokens": 4}
HOSTILE = "<img src=x onerror=console.error(1)>"
LONG = "W" * 128
RUNNING = "document.getElementById('state')?.textContent == 'Running'"
FOCUSED = "document.activeElement.id == 'key' && document.activeElement.checkVisibility()"
OVERFLOW = "document.documentElement.scrollWidth - window.innerWidth"
SHOWN = (
    "[...document.querySelectorAll('section')].filter((s) => s.checkVisibility()).map((s) => s.id)"
)
NOTHING_ON = """
[service]
state_dir = "state"
[plugins.kv_chunks]
enabled = false
"""


def says(text):
    return f"document.body?.innerText.includes({text!r})"


@pytest.fixture
def browser(tmp_path):
    folder = tmp_path / "browser"
    folder.mkdir()
    with browsing(folder) as browser:
        yield browser
        assert browser.problems == []


@pytest.fixture
def plain(tmp_path):
    """Yield a server without keys, on which two plugins are on."""
    with serving(
        tmp_path,
        config=CONFIG.format(service="", codec="lossless", kv="") + "[plugins.deadlines]\n",
    ) as server:
        yield server


def test_it_loads_and_updates(plain, browser):
    browser.open(plain.address)
    browser.wait_for(RUNNING)
    browser.wait_for(says("There is no context yet."))
    assert browser.evaluate(SHOWN) == ["now", "memory", "speed", "contexts", "promises", "saved"]
    for app in (HOSTILE, "mail"):
        plain.client.bind(app).new_context("Anna is here.").call("Hi", **SHORT)
    browser.wait_for(says("in cells"))
    browser.wait_for("document.querySelectorAll('.contexts tbody tr').length == 2")
    assert HOSTILE in browser.text()
    assert browser.evaluate("document.images.length") == 0
    browser.wait_for(says("tokens/s"))
    browser.wait_for("document.querySelector('#memory polygon').points.numberOfItems >= 6")
    owners = browser.evaluate("document.querySelector('#memory tbody').innerText")
    assert "The rest" in owners
    assert "Contexts in RAM" in owners
    assert "neither read nor computed" in owners
    assert "MB" in owners


def test_code_that_is_put_in_does_not_run_and_is_noticed(plain, browser):
    browser.open(plain.address)
    browser.wait_for(RUNNING)
    browser.evaluate("void setTimeout(() => { throw new Error('thrown by the test'); })")
    browser.evaluate(
        "void document.body.append(Object.assign(document.createElement('img'), "
        "{src: 'http://127.0.0.1:9/x.png'}))"
    )
    with pytest.raises(AssertionError, match="TrustedHTML"):
        browser.evaluate("document.body.innerHTML = '<b>bold</b>'")
    browser.evaluate("new Promise((done) => { setTimeout(done, 100); })")  # events come before
    problems = str(browser.problems)
    assert "thrown by the test" in problems
    assert "violates the following Content Security Policy directive" in problems
    browser.problems.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_narrow_window(plain, browser, scheme):
    for app in (LONG, HOSTILE):
        plain.client.bind(app).new_context("Anna is here.").call("Hi", **SHORT)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.send("Emulation.setEmulatedMedia", features=features)
    browser.open(plain.address, width=360)
    browser.wait_for(RUNNING)
    browser.wait_for(says(LONG))
    assert browser.evaluate(OVERFLOW) <= 0
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    is_dark = int(background[4:].partition(",")[0]) < 128
    assert is_dark == (scheme == "dark")


def test_it_says_when_the_service_is_gone_and_goes_on_when_it_is_back(plain, browser, tmp_path):
    browser.open(plain.address)
    browser.wait_for(RUNNING)
    plain.stop()
    browser.wait_for(says("No answer from the service. Trying again…"))
    config = CONFIG.format(service="", codec="lossless", kv="")
    with launched(tmp_path, "--port", str(plain.port), config=config):
        browser.wait_for(RUNNING)
        browser.wait_for("!document.getElementById('promises').checkVisibility()")


def test_without_plugins_it_says_so(tmp_path, browser):
    with serving(tmp_path, config=NOTHING_ON) as server:
        server.client.bind("mail").new_context("Anna is here.").call("Hi", **SHORT)
        browser.open(server.address)
        browser.wait_for(says("No plugin is on"))
        assert browser.evaluate(SHOWN) == ["now", "memory", "speed", "contexts", "saved"]
        assert "Where they are is unknown without the plugin kv_chunks." in browser.text()


def test_keys(tmp_path, browser):
    with limited(tmp_path) as server:
        server.client.bind("notes").new_context("Nobody is here.").call("Hi", **SHORT)
        mail = LLMClient(server.address, api_key=MAIL, timeout_s=60).bind("mail")
        mail.new_context("Anna is here.").call("Hi", **SHORT)
        browser.open(server.address)
        browser.wait_for(says("This service needs a key."))
        assert browser.evaluate(SHOWN) == []
        for key, answer in (("wrong", "This key was not accepted."), ("ключ", "This is no key")):
            browser.wait_for(FOCUSED)
            browser.type(key)
            browser.press("Enter")
            browser.wait_for(says(answer))
        browser.type(MAIL)
        browser.press("Enter")
        browser.wait_for(says("Contexts of app mail."))
        assert browser.evaluate(SHOWN) == ["contexts"]
        assert "notes" not in browser.text()
        browser.evaluate("document.getElementById('forget').click()")
        browser.wait_for(FOCUSED)
        assert browser.evaluate(SHOWN) == []
        browser.type(ADMINISTRATOR)
        browser.press("Enter")
        browser.wait_for(RUNNING)
        assert {"mail", "notes"} <= set(browser.text().split())
        browser.send("Page.reload")
        browser.wait_for(says("This service needs a key."))
        kept = "document.cookie + localStorage.length + sessionStorage.length"
        assert browser.evaluate(kept) == "00"
        assert browser.evaluate("location.href") == f"{server.address}/"
