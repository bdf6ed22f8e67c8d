"""Mixed load with faults and all four plugins for half an hour: no loss and no wrong restore.

Four apps talk to ``llmaas serve`` over a Unix socket at the same time. They call, stream, break
streams off and delete contexts, while other clients send malformed requests. Every few seconds
SIGKILL or SIGTERM ends the server's life. In some lives the disk fails at random, and between
lives bytes of the store are damaged. Tiny budgets make both tiers evict all the time. Each
acknowledged reply must still be there in the next life. It must be stock llama.cpp's reply if
cells are kept bit for bit and no distribution is mixed. The kernel's count of the server's memory
must stay within the budget.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import served
from cgroups import file_bytes, memory_group
from conversations import APPS, ENGINE, GREEDY, PROMPTS, follows, system_prompt, vanilla
from datastores import stored
from packed_models import pack
from preparing import prepare
from soak import scale

from llmaas_hooks import LlmaasError
from llmaas_plugins.flash_weights.memory import MARGIN_BYTES
from llmaas_plugins.process_memory import SPARE_BYTES

SECONDS = scale(5, 300)  # six parts of `make soak` with all four plugins
KV_SECONDS = scale(5, 120)
LIFE_S = (0.5, scale(1.5, 20.0))
MIB = 1 << 20
RAM_BUDGET, DISK_BUDGET = 2 * MIB, 1200 << 10
OVERHEAD = 8 * MIB  # beside the budget: indexes, SQLite, loader threads
SERVICE = "max_contexts_per_app = 1"
KV = f"ram_budget = {RAM_BUDGET}\ndisk_budget = {DISK_BUDGET}\n"
KVS = {
    "lossless": KV,
    "tolerance": KV + 'share_across_apps = true\nparked_tokens = 256\nwrite_budget = "1 GiB"',
}
STREAMED = 3 * MIB  # weights that do not fit into the budget
FOUR = """
on_error = "raise"
[service]
state_dir = "state"
{service}
[plugins.elastic]
[plugins.flash_weights]
memory_budget = {budget}
arena = "1 MiB"
[plugins.knn_lm]
store = "{knn}"
mix = {mix}
drafts = true
[plugins.kv_chunks]
codec = "{codec}"
store = "kv"
{kv}
"""
FOURS = scale([(0, "mixing")], [(part, kind) for part in range(3) for kind in ("exact", "mixing")])
ENDS = (OSError, http.client.HTTPException)  # errors of a client whose server is killed


class Talk:
    """One app's conversation over all lives of the server.

    Attributes:
        messages: Acknowledged messages of its context; None without a context.
        in_doubt: Whether one more operation may be complete though its answer never came.
    """

    def __init__(self, name, expected):
        """Store the app's name, and its messages after each call if these are known."""
        self.name = name
        self.expected = expected
        self.rng = random.Random(name)
        self.messages = None
        self.in_doubt = False
        self.n_acknowledged = 0
        self.failures = []

    def live(self, client, end):
        """Talk until ``end`` is set; the target of a thread."""
        app = client.bind(self.name)
        try:
            while not end.is_set():
                try:
                    self.step(app)
                except ENDS:
                    time.sleep(0.05)
                except LlmaasError as error:
                    if not ("503" in str(error) or "closed the stream" in str(error)):
                        raise  # the error is not due to the server's end
        except BaseException as failure:
            self.failures.append(failure)

    def step(self, app):
        context = self.find(app)
        self.in_doubt = True
        if context is None:
            app.new_context(system_prompt(self.name))
            self.messages = [{"role": "system", "content": system_prompt(self.name)}]
        elif follows(self.messages, None, self.name):
            context.delete()
            self.messages = None
        else:
            prompt = PROMPTS[len(self.messages) // 2]
            said = self.talk(context, prompt)
            if said is None:
                return
            self.messages += [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": said},
            ]
            self.n_acknowledged += 1
        self.in_doubt = False

    def find(self, app):
        """Return the app's context, if any; assert that it is exactly as the app left it."""
        contexts = app.contexts()
        there = contexts[0].record()["messages"] if contexts else None
        ahead = self.in_doubt and follows(self.messages, there, self.name)
        assert there == self.messages or ahead, (there, self.messages)
        if self.expected is not None and there is not None:
            assert there in self.expected
        self.messages, self.in_doubt = there, False
        return contexts[0] if contexts else None

    def talk(self, context, prompt):
        """Return the reply; None if the app broke the stream off."""
        how = self.rng.random()
        if how < 0.15:
            with contextlib.closing(context.stream(prompt, **GREEDY)) as pieces:
                next(pieces, None)
            return None
        if how < 0.5:
            return "".join(context.stream(prompt, **GREEDY)).strip()
        return context.call(prompt, **GREEDY)["text"]


def send_rubbish(path, end, rng):
    """Send malformed requests, and die in the middle of requests; the target of a thread."""
    chat = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}).encode()
    kind = b"Content-Type: application/json\r\n"
    post = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        + kind
        + b"Content-Length: %d\r\n\r\n"
    )
    rubbish = [
        rng.randbytes(2000),
        b"POST /v1/llmaas/apps/x/contexts HTTP/1.1\r\nContent-Length: 99999\r\n\r\n{",
        post % 4 + b"{{{{",
        (post % len(chat)).replace(kind, b"") + chat,
        post % len(chat) + chat,
        b"GET /v1/llmaas/status HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]
    while not end.wait(0.05):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(0.2)
            client.connect(str(path))
            client.sendall(rng.choice(rubbish))
            client.recv(100)


@contextlib.contextmanager
def bad_disk(folder, library):
    """Give servers started inside the block a store disk that fails after a signal."""
    with pytest.MonkeyPatch.context() as patch:
        here = Path(__file__).parent / "serve_on_a_bad_disk.py"
        patch.setattr(served, "LLMAAS", [sys.executable, str(here), str(folder / "kv")])
        patch.setenv("LD_PRELOAD", str(library))
        yield lambda running: running.process.send_signal(signal.SIGUSR1)


def live(folder, talks, seconds, how, rng, *, fail=None, **server):
    """Run a server under load, end it by a signal and return its last plugin status."""
    end, path = threading.Event(), folder / "s"
    (folder / "log").unlink(missing_ok=True)
    with served.serving(folder, uds=path, **(ENGINE | server)) as running:
        threads = [threading.Thread(target=t.live, args=(running.client, end)) for t in talks]
        threads.append(threading.Thread(target=send_rubbish, args=(path, end, rng)))
        if fail is not None:
            fail(running)
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        report = running.status()["plugins"]
        code = running.stop(how)
        end.set()
        for thread in threads:
            thread.join()
        assert code == (0 if how == signal.SIGTERM else -how), running.log()
        assert [failure for talk in talks for failure in talk.failures] == []
        assert " 500 " not in running.log()
        assert "Traceback" not in running.log(), running.log()
    return report


def damage(folder, rng):
    """Overwrite a few bytes anywhere in the store."""
    for path in rng.sample([p for p in (folder / "kv").iterdir() if p.stat().st_size], 1):
        n_bytes = path.stat().st_size
        with path.open("r+b") as file:
            for _ in range(rng.randint(1, 50)):
                file.seek(rng.randrange(n_bytes))
                file.write(rng.randbytes(1))


def needed(group, folder):
    """Return the peak bytes of an ended group, less files that it was charged for by chance."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "chunks.slab"]
    own = sum(path.stat().st_size for path in files)  # the slab bypasses the page cache
    return group.peak - max(0, file_bytes(group) - own)


def in_group(group):
    """Return a function that starts an interpreter of its own in the group."""
    return functools.partial(subprocess.Popen, preexec_fn=group.join)


@pytest.fixture(scope="module")
def expected(reference_model):
    return {app: said(reference_model, app) for app in APPS}


@pytest.fixture(scope="module")
def vanilla_peak(tmp_path_factory):
    """Return the peak bytes of a server without plugins under the same load."""
    talks = [Talk(app, None) for app in APPS]
    folder = tmp_path_factory.mktemp("vanilla")
    with memory_group() as group:
        options = {"environ": {"LLMAAS_PLUGINS": ""}, "start": in_group(group)}
        live(folder, talks, LIFE_S[1], signal.SIGTERM, random.Random(0), **options)
        return needed(group, folder)


@pytest.fixture(scope="module")
def four(reference_model, tmp_path_factory):
    """Return the path of a prepared, packed model with a datastore, and its configuration's parts.

    The budget is the peak of a server that did all kinds of work, with what is kept free and the
    contexts' RAM tier, less some of the weights.
    """
    folder = tmp_path_factory.mktemp("four")
    model = prepare(reference_model, folder / "model.gguf")
    pack(model)
    stored(model).write(folder / "knn")
    parts = {"service": SERVICE, "knn": folder / "knn"}
    roomy = FOUR.format(budget=1 << 30, codec="lossless", kv=KV, mix="true", **parts)
    options = {"config": roomy, "model": model}
    options["start"] = subprocess.Popen  # as the lives, because its memory is measured
    with served.serving(folder, uds=folder / "s", **(ENGINE | options)) as running:
        for app in APPS:
            context = running.client.bind(app).new_context(system_prompt(app))
            for prompt in PROMPTS:
                context.call(prompt, **GREEDY)
        resident = running.status()["plugins"]["flash_weights"]["resident_bytes"]
    beside = RAM_BUDGET + SPARE_BYTES + MARGIN_BYTES
    return model, parts | {"budget": resident + beside - STREAMED}


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("codec", scale(["lossless"], KVS))
def test_mixed_load_with_faults(tmp_path, library, vanilla_peak, expected, codec):
    talks = [Talk(app, expected[app] if codec == "lossless" else None) for app in APPS]
    options = {"service": SERVICE, "kv": KVS[codec], "codec": codec}
    load = Load(tmp_path, talks, library, random.Random(11), options)
    load.run(KV_SECONDS)
    assert max(load.peaks) <= vanilla_peak + RAM_BUDGET + OVERHEAD


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("part", "kind"), FOURS)
def test_mixed_load_of_all_four_plugins(tmp_path, library, four, part, kind):
    model, parts = four
    values = {
        "exact": {"codec": "lossless", "kv": KV, "mix": "false"},
        "mixing": {"codec": "tolerance", "kv": KV + "parked_tokens = 256", "mix": "true"},
    }
    config = FOUR.format(**parts, **values[kind])
    talks = [Talk(app, said(model, app) if kind == "exact" else None) for app in APPS]
    rng = random.Random(f"{part} {kind}")
    load = Load(tmp_path, talks, library, rng, {"config": config, "model": model})
    load.run(SECONDS)
    assert max(load.peaks) <= parts["budget"]
    for report in load.reports:
        streamed = report["flash_weights"]
        assert streamed["mode"] == "exact"
        gave_way = all(model["kept_bytes"] == 0 for model in streamed["models"])
        assert all(model["kept_bytes"] < model["bytes"] for model in streamed["models"])
        assert gave_way or streamed["resident_bytes"] <= parts["budget"]


def said(model, app):
    return [messages for messages, _ in vanilla(model, app)]


class Load:
    """Lives of a server, one after the other.

    Attributes:
        peaks: Peak bytes of each life.
        reports: Plugin status at the end of each life.
    """

    def __init__(self, folder, talks, library, rng, options):
        self.folder, self.talks, self.library, self.rng = folder, talks, library, rng
        self.options = options
        self.peaks, self.reports = [], []

    def run(self, seconds):
        """Run lives for this long; assert that budgets held and that work was done."""
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            self.live()
            assert (self.folder / "kv" / "chunks.slab").stat().st_size <= DISK_BUDGET
            if self.rng.random() < 0.3:
                damage(self.folder, self.rng)
        n_said = [talk.n_acknowledged for talk in self.talks]
        restored, io_errors = (self.total(name) for name in ("restored_tokens", "io_errors"))
        sys.stdout.write(f"{len(self.peaks)} lives, {restored} tokens restored, calls {n_said}, ")
        sys.stdout.write(f"{io_errors} I/O errors, peak {max(self.peaks)} bytes\n")
        # a busy machine may stop one app from talking
        assert min(n_said) >= scale(0, len(self.peaks) / 4)
        assert sum(n_said) >= len(self.peaks)
        assert restored > scale(-1, 0)  # a short form may have a single life

    def live(self):
        """Run one life, perhaps on a disk that fails."""
        rng = self.rng
        how, fails = rng.choice([signal.SIGKILL, signal.SIGTERM]), rng.random() < 0.4
        disk = bad_disk(self.folder, self.library) if fails else contextlib.nullcontext()
        with memory_group() as group:
            options = self.options | {"start": in_group(group)}
            with disk as fail:
                seconds = rng.uniform(*LIFE_S)
                report = live(self.folder, self.talks, seconds, how, rng, fail=fail, **options)
            self.peaks.append(needed(group, self.folder))
        self.reports.append(report)

    def total(self, name):
        return sum(report["kv_chunks"][name] for report in self.reports)
