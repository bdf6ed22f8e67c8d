"""The model that all plugins serve at once, with everything that they need beside it."""

from __future__ import annotations

import pytest
from datastores import built, filling
from leveled import write_times
from preparing import prepare
from together import DRAFTS, FIRST, NEXT, PAIRS, run

from llmaas_eval.data import packaged_lines
from llmaas_plugins.chats.exports import Conversation, Message
from llmaas_plugins.cli.main import main
from llmaas_plugins.elastic import latency


def remember_own(model, directory):
    """Fill an archive with what the model says, so that drafts are proposed and accepted."""
    first = run(model, {}, directory, is_alone=True)
    then = run(model, {}, directory, first["contexts"], is_alone=True)
    answers = [(FIRST[name], first["said"][name][0]) for name in FIRST]
    answers += [(NEXT, found[-1]) for one in (first, then) for found in one["said"].values()]
    with filling(model, directory) as (llama, add):
        chats = [
            Conversation(f"{i}", "chat", messages_of(question, llama.detokenize(answer)), True)
            for i, (question, answer) in enumerate(answers)
        ]
        add(chats)


def messages_of(question, answer):
    return Message("user", question), Message("assistant", answer.decode(errors="replace").strip())


@pytest.fixture(scope="session")
def model(packaged_model, shared):
    """Return a prepared model with a packed file, a channel file, a datastore and measured times.

    Its folder is the home of the processes that use it.
    """

    def fill(folder):
        path = prepare(packaged_model, folder / "model.gguf")
        text = folder / "text.txt"
        text.write_text("\n".join(line for lines in packaged_lines() for line in lines))
        command = ["flash", "pack", "--sparse", "--equal-shares", "--text", str(text), str(path)]
        assert main(command) == 0
        built(path, folder / PAIRS)
        remember_own(path, folder / DRAFTS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(latency, "DIRECTORY", folder / ".cache" / "llmaas" / "latency")
            write_times(path)

    return shared("together", fill) / "model.gguf"
