"""A life of a service, for ``test_kills.py``: the argument is its job, in JSON.

Each line of the output is a complete operation.
"""

from __future__ import annotations

import itertools
import json
import sys

from conversations import APPS, ENGINE, GREEDY, PROMPTS, digest, system_prompt
from llama_cpp import Llama

from llmaas_plugins import activate
from llmaas_plugins.service import LLMService, ServiceConfig


def say(**line):
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def live(job):
    """Serve the contexts in turn, each until all prompts were answered; then begin it anew.

    Budgets are so small that both tiers evict all the time.
    """
    say(op="start")
    kv = {"disk_budget": "1200 KiB", "store": job["folder"] + "/kv"} | job["settings"]
    config = ServiceConfig(state_dir=job["folder"] + "/state", max_contexts_per_app=1)
    with activate({"on_error": "raise", "plugins": {"kv_chunks": kv}}) as suite:
        llama = Llama(job["model"], **ENGINE)
        with LLMService(llama, config) as service:
            apps = [service.bind(name) for name in APPS]
            for app in apps:
                for context in app.contexts():
                    say(op="found", app=app.name, id=context.id, messages=context.record().messages)
            say(op="ready", status=suite.status()["plugins"]["kv_chunks"])
            for i, app in zip(range(job["n_operations"]), itertools.cycle(apps), strict=False):
                operate(llama, app, has_digest=i % 2 == 0)
            say(op="done", status=suite.status()["plugins"]["kv_chunks"])
        llama.close()


def operate(llama, app, *, has_digest):
    """Make a context if there is none; then call the model, or delete the context at its end."""
    context = next(iter(app.contexts()), None)
    if context is None:
        context = app.new_context(system_prompt(app.name))
        say(op="new", app=app.name, id=context.id)
    record = context.record()
    if record.n_calls == len(PROMPTS):
        context.delete()
        say(op="delete", app=app.name, id=context.id)
        return
    reply = context.call(PROMPTS[record.n_calls], **GREEDY)
    cells = digest(llama) if has_digest else None
    say(op="call", app=app.name, id=context.id, n=record.n_calls, text=reply.text, cells=cells)


if __name__ == "__main__":
    live(json.loads(sys.argv[1]))
