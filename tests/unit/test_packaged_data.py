"""The packaged model and conversations, against the model card and the demo's descriptions."""

from __future__ import annotations

import hashlib
import re

import llama_cpp
import pytest

from llmaas_plugins.chats.exports import load_conversations
from llmaas_plugins.reference_model import reference_model_path

MODEL = reference_model_path()
FOLDER = MODEL.parents[1] / "demo" / "conversations"
TURN_TOKENS = {
    "chat": (15, 40),
    "summary": (60, 110),
    "translation": (20, 50),
    "classification": (25, 60),
    "smart_reply": (15, 40),
    "ui_agent": (40, 90),
}
MAX_CONTEXT_TOKENS = 900
REPLY_TOKENS = 25


@pytest.fixture(scope="module")
def n_tokens():
    vocab = llama_cpp.Llama(str(MODEL), vocab_only=True, n_ctx=64, verbose=False)
    yield lambda text: len(vocab.tokenize(text.encode(), add_bos=False))
    vocab.close()


@pytest.fixture(params=TURN_TOKENS)
def app(request):
    return request.param


def turns(conversation, role):
    return [message.content for message in conversation.messages if message.role == role]


def test_model_is_the_one_on_the_card():
    card = (MODEL.parent / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert hashlib.sha256(MODEL.read_bytes()).hexdigest() in re.findall(r"\b[0-9a-f]{64}\b", card)


def test_apps_are_the_six():
    assert {path.stem for path in FOLDER.glob("*.jsonl")} == set(TURN_TOKENS)


def test_each_app_has_two_conversations_of_alternating_turns(app):
    conversations = load_conversations(FOLDER / f"{app}.jsonl")
    assert len(conversations) == 2
    for conversation in conversations:
        assert conversation.app == app
        assert 10 <= len(turns(conversation, "user")) <= 14
        roles = [message.role for message in conversation.messages if message.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_turn_lengths(app, n_tokens):
    low, high = TURN_TOKENS[app]
    for conversation in load_conversations(FOLDER / f"{app}.jsonl"):
        for turn in turns(conversation, "user"):
            assert low <= n_tokens(f"User: {turn}\n") <= high, turn


def test_contexts_stay_short(app, n_tokens):
    for conversation in load_conversations(FOLDER / f"{app}.jsonl"):
        asked = [f"User: {turn}\n" for turn in turns(conversation, "user")]
        system = [f"{turn}\n" for turn in turns(conversation, "system")]
        total = sum(map(n_tokens, asked + system)) + REPLY_TOKENS * len(asked)
        assert total < MAX_CONTEXT_TOKENS, conversation.title


def test_texts_are_one_line_and_never_repeat():
    seen: set[str] = set()
    for app in TURN_TOKENS:
        for conversation in load_conversations(FOLDER / f"{app}.jsonl"):
            for turn in turns(conversation, "user"):
                assert "\n" not in turn
                assert turn not in seen
                seen.add(turn)
