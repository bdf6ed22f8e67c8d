"""Lives of a service, each in a fork of a process that has loaded all modules.

Each line of the input is a job. Each line of the output is a complete operation, or the end of a
life and its exit code. Importing the modules takes longer than a life, so it is done once.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys

from conversations import APPS, ENGINE, GREEDY, PROMPTS, digest, system_prompt
from llama_cpp import Llama

from llmaas_plugins import activate
from llmaas_plugins.service import LLMService, ServiceConfig

LATE = ("kv_chunks.plugin", "kv_chunks.plugin_counters", "kv_chunks.transfer.transfer")
"""Modules that an activation or an engine would import."""


def say(**line):
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def live(job):
    """Serve the contexts in turn, each until all prompts were answered; then begin it anew.

    Budgets are so small that both tiers evict all the time.
    """
    say(op="start", pid=os.getpid())
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


def main():
    for name in LATE:
        importlib.import_module(f"llmaas_plugins.{name}")
    for job in map(json.loads, sys.stdin):
        pid = os.fork()
        if pid == 0:
            live(job)
            return
        _, status = os.waitpid(pid, 0)
        say(op="end", code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
