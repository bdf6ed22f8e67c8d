"""Chat exports: conversations that are read, left out, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmaas_hooks.errors import ConfigError
from llmaas_plugins.chats.exports import Conversation, Message, load_conversations
from llmaas_plugins.files import json_rows

DATA = Path(__file__).parents[2] / "data" / "chats"
USER_ROW = {"messages": [{"role": "user", "content": "hi"}]}


def write(tmp_path, content):
    path = tmp_path / "export.any"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(path, **options):
    with pytest.raises(ConfigError) as caught:
        load_conversations(path, **options)
    message = str(caught.value)
    assert str(path) in message
    return message


def chatgpt(mapping, current_node):
    return json.dumps([{"title": "t", "mapping": mapping, "current_node": current_node}])


def node(text, parent=None, **fields):
    message = {"author": {"role": "user"}, "content": {"content_type": "text", "parts": [text]}}
    return {"message": message | fields, "parent": parent, "children": []}


def test_jsonl_rows():
    keys, owl, bakery = load_conversations(DATA / "openai.jsonl")
    assert keys == Conversation(
        title="Keys",
        app="smart_reply",
        messages=(
            Message("system", "Be short."),
            Message("user", "Did I leave my keys at your place?"),
            Message("assistant", "Yes, they are on the shelf."),
        ),
    )
    assert owl.messages == (
        Message("user", "What is on this picture?\nAnswer in one word."),
        Message("assistant", "Owl 🦉"),
    )
    assert (bakery.title, bakery.app) == ("openai 3", "chat")
    assert [message.role for message in bakery.messages] == ["user", "assistant"]
    assert bakery.messages[0].content == "Is the bakery open?"


def test_json_document_reads_as_jsonl_does():
    assert load_conversations(DATA / "openai.json") == load_conversations(DATA / "openai.jsonl")[:2]


@pytest.mark.parametrize("indent", [None, 2])
def test_single_object(tmp_path, indent):
    (only,) = load_conversations(write(tmp_path, json.dumps(USER_ROW, indent=indent)))
    assert only.messages == (Message("user", "hi"),)


def test_chatgpt_follows_the_current_branch():
    eggs, untitled = load_conversations(DATA / "conversations.json")
    assert eggs.title == "Eggs"
    assert eggs.messages == (
        Message("user", "How long do eggs keep?"),
        Message("assistant", "About three weeks in the fridge."),
        Message("user", "And this one?"),
        Message("assistant", "That one is a golf ball."),
    )
    assert untitled == Conversation(
        "conversations 3", "chat", (Message("user", "Hello again"),), True
    )


def test_byte_order_mark_blank_lines_and_windows_newlines(tmp_path):
    line = json.dumps(USER_ROW)
    path = write(tmp_path, f"\ufeff\r\n{line}\r\n\r\n{line}\r\n")
    assert len(load_conversations(path)) == 2


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (rb"lone \ud83d half", "lone \ufffd half"),
        (rb"pair \ud83d\ude00", "pair \U0001f600"),
        (rb"nul \u0000 byte", "nul \ufffd byte"),
        ("separator \u2028 kept".encode(), "separator \u2028 kept"),
        ("العربية e\u0301 👩‍👩‍👧".encode(), "العربية e\u0301 👩‍👩‍👧"),
    ],
)
def test_odd_unicode_becomes_encodable_text(tmp_path, raw, expected):
    path = write(tmp_path, b'{"messages": [{"role": "user", "content": "' + raw + b'"}]}')
    (only,) = load_conversations(path)
    assert only.messages[0].content == expected
    only.messages[0].content.encode()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "an empty file"),
        (" \n\n", "an empty file"),
        ("[]", "no message with text"),
        ('{"messages": []}', "no message with text"),
        ("hello", ":1:1: found invalid JSON"),
        ('"hello"', "str 'hello'"),
        (b"PK\x03\x04rest", "a zip archive"),
        ("[1]".encode("utf-16"), "UTF-16 text"),
        ("[" * 100_000, "JSON nested too deeply"),
        ('{"messages": ' * 100_000, "JSON nested too deeply"),
        (f"{json.dumps(USER_ROW)}\n" + "[" * 100_000, ":2: found JSON nested too deeply"),
        (f"{json.dumps(USER_ROW)}\n\n".encode() + b'{"a": "caf\xe9"}', ":3: found a byte 0xe9"),
        (b'[\n  {"messages":\n    [{"role": "caf\xe9"}]}]', ":3: found a byte 0xe9 that is not"),
        ("[1]".encode("utf-16-le"), ":1: found a byte 0x00 that is not UTF-8"),
        (f"{json.dumps(USER_ROW)}\n".encode() + b"\0\0\0", ":2: found a byte 0x00"),
        (json.dumps([USER_ROW])[:-5], "found invalid JSON"),
        (f"{json.dumps(USER_ROW)}\n{json.dumps(USER_ROW)[:-5]}", ":2:"),
        ('{"messages": ' + "9" * 5_000 + "}", "invalid JSON"),
        (f"{json.dumps(USER_ROW)}\nnot json", ":2:1: found invalid JSON"),
        (f"{json.dumps(USER_ROW)}\n[1]", ":2: found a list of 1"),
        ('[{"messages": [}]', ":1:16: found invalid JSON"),
        ('[1, {"a": 2}]', "row 1: found int '1'"),
        ('{"prompt": "x"}', ":1: found an object with keys 'prompt'"),
        ('{"messages": "x"}', "str 'x' in 'messages'"),
        ('{"messages": [{"content": "x"}]}', "message 1: found an object with keys 'content'"),
        ('{"messages": [{"role": "user", "content": 5}]}', "content int '5'"),
        ('{"messages": [{"role": "pirate", "content": "x"}]}', "role str 'pirate'"),
        ('{"messages": [{"role": null, "content": "x"}]}', "role null"),
        ('{"messages": [{"role": "user", "content": [{"type": []}]}]}', "no message with text"),
    ],
)
def test_refusals_say_where_and_what(tmp_path, content, found):
    message = refusal(write(tmp_path, content))
    assert found in message
    assert "expected" in message


@pytest.mark.parametrize(
    ("mapping", "current", "found"),
    [
        ({"a": node("x", "b"), "b": node("y", "a")}, "a", "a cycle at node 'a'"),
        ({"a": node("x", "a")}, "a", "a cycle at node 'a'"),
        ({"a": node("x", "gone")}, "a", "a link to str 'gone'"),
        ({"a": node("x", ["a"])}, "a", "a link to a list of 1"),
        ({"a": node("x")}, "b", "a link to str 'b'"),
        ({"a": node("x")}, None, "'mapping'"),
        ({"a": 5}, "a", "a link to str 'a'"),
        ([], None, "'mapping'"),
        ({"a": node("x", author=None)}, "a", "node 'a': found an object"),
        ({"a": node("x", author={"role": "ghost"})}, "a", "role str 'ghost'"),
        ({"a": node("x", content={"content_type": ["text"]})}, "a", "no message with text"),
        ({}, None, "no message with text"),
    ],
)
def test_chatgpt_refusals(tmp_path, mapping, current, found):
    assert found in refusal(write(tmp_path, chatgpt(mapping, current)))


def test_long_chatgpt_thread_needs_no_recursion(tmp_path):
    mapping = {str(i): node(f"turn {i}", str(i - 1) if i else None) for i in range(5_000)}
    (only,) = load_conversations(write(tmp_path, chatgpt(mapping, "4999")))
    assert [only.messages[i].content for i in (0, -1)] == ["turn 0", "turn 4999"]


def test_size_limit_is_checked_before_reading(tmp_path):
    path = write(tmp_path, json.dumps(USER_ROW))
    n_bytes = path.stat().st_size
    assert load_conversations(path, max_bytes=n_bytes)
    assert f"found {n_bytes} bytes, expected at most {n_bytes - 1}" in refusal(
        path, max_bytes=n_bytes - 1
    )


def test_missing_file_and_folder(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.json")
    assert "not a regular file" in refusal(tmp_path)


def test_error_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match="empty file"):
        load_conversations(write(tmp_path, ""))


def test_a_conversation_of_hundreds_of_megabytes_is_refused_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(json_rows, "_MOST_LINE_BYTES", 1000)
    row = {"messages": [{"role": "user", "content": "x" * 1000}]}
    long = write(tmp_path, f"{json.dumps(USER_ROW)}\n{json.dumps(row)}\n")
    assert ":2: found a longer line, expected at most 0 MiB for a conversation" in refusal(long)
    document = write(tmp_path, json.dumps([row, USER_ROW]))  # like ChatGPT's, all on one line
    assert len(load_conversations(document)) == 2
