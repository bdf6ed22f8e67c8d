"""The question of a prompt."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from gguf import TokenType
from vocabularies import byte_tokens, opened_vocabulary

from llmaas_plugins.short_prompts.protection import prompt_of
from llmaas_plugins.short_prompts.vocabulary import vocabulary_of

STORY = "the dog went out and saw the cat there, and then it all went on as before. "


def question(prompt):
    return "".join(prompt.words[prompt.question :])


@pytest.mark.parametrize(
    ("opening", "asked", "said"),
    [
        ("", "User: ", "\nAssistant:"),
        ("System: be good\n", "User: ", "\nAssistant:"),
        ("", "### Instruction:\n", "\n\n### Response:"),
        ("be good. ", "USER: ", " ASSISTANT:"),
        ("", "[INST] ", " [/INST]"),
        ("", "<|user|>\n", "</s>\n<|assistant|>"),
        ("", "Q: ", "\nA:"),
        ("", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant"),
        ("", "<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model"),
    ],
)
def test_the_question_is_the_users_last_turn(prompt, opening, asked, said):
    one = f"{asked}{STORY}{said} so it is.\n"
    found = prompt(f"{opening}{one}{one}{asked}where is the dog now?{said}")
    assert question(found).strip().startswith("where is the dog now?")
    assert found.is_protected[found.question :].all()
    said_words = [at for at, word in enumerate(found.words) if word == " so"]
    assert not found.is_protected[said_words].any()
    text = "".join(word for word, kept in zip(found.words, found.is_protected, strict=True) if kept)
    assert text.count(asked.strip()) == 3


def test_choices_belong_to_the_question(prompt):
    choices = "Question: where is it now?\nA: in the sea\nB: on the hill\nC: in the wood\nAnswer:"
    found = prompt(f"{STORY * 5}\n\n{choices}")
    assert question(found) == choices.removeprefix("Question:")
    assert found.is_protected[found.question :].all()


def test_an_empty_last_turn_is_no_question(prompt):
    found = prompt(f"User: {STORY}\nAssistant: yes.\nUser:")
    assert question(found).strip().startswith("the dog")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{STORY * 9}\n\nso where is the dog now, and what of the cat?", "so where"),
        (f"{STORY * 9}\nso where is the dog now, and what of the cat?", "so where"),
        (f"{STORY * 9} so where is the dog now, and what of the cat?", "so where"),
        (f"{STORY * 9} so where is the dog now? it is now in", "so where"),
        (f"{STORY}\n\n{STORY * 9}\nso where is the dog, and the cat?", "so where"),
        ("no end of words " * 50, "end of words"),
        ("no end of words " * 9, "end of words"),
    ],
)
def test_a_text_ends_with_its_question(prompt, text, expected):
    found = prompt(text)
    assert question(found).strip().startswith(expected)
    assert found.is_protected[found.question :].all()
    assert not found.is_protected[1 : found.question].all()


def test_of_a_long_turn_the_first_line_and_the_last_paragraph_are_kept(prompt):
    first, last = "tell me in one line what this is:\n", "\n\nnow say it as well as you can, do."
    found = prompt(f"User: {first}{(STORY * 9).rstrip()}{last}\nAssistant:")
    assert question(found) == f"{last}\nAssistant:"
    text = "".join(word for word, kept in zip(found.words, found.is_protected, strict=True) if kept)
    assert text == f" User: {first.rstrip()}{last}\nAssistant:"


def test_the_end_of_what_follows_the_question_is_kept(prompt):
    found = prompt(f"User: where is the dog?\nAssistant: {STORY * 9}and so the dog is now in the")
    assert found.is_protected[-3:].all()
    assert not found.is_protected.all()


@pytest.mark.parametrize("text", ["", "x", "\n", "<s>", "User:", "User: x", "Assistant:"])
def test_short_prompts_are_kept(prompt, text):
    found = prompt(text)
    assert 0 <= found.question <= len(found.words)
    assert found.is_protected.all()


@pytest.mark.parametrize(
    ("opens", "says"),
    [
        (["<|im_start|>", "user\n"], ["<|im_end|>", "\n", "<|im_start|>", "assistant\n"]),
        (
            ["<|start_header_id|>", "user", "<|end_header_id|>", "\n\n"],
            ["<|eot_id|>", "<|start_header_id|>", "assistant", "<|end_header_id|>", "\n\n"],
        ),
        (["<start_of_turn>", "user\n"], ["<end_of_turn>", "\n", "<start_of_turn>", "model\n"]),
        (["<|user|>", "\n"], ["<|end|>", "\n", "<|assistant|>", "\n"]),
        (["[INST]"], ["[/INST]"]),
        (["<\uff5cUser\uff5c>"], ["<\uff5cAssistant\uff5c>"]),
        (["<|START|>", "<|USER_TOKEN|>"], ["<|END|>", "<|START|>", "<|CHATBOT_TOKEN|>"]),
        (["<extra_id_1>", "User\n"], ["\n", "<extra_id_1>", "Assistant\n"]),
        (
            ["<|start|>", "user", "<|message|>"],
            ["<|end|>", "<|start|>", "assistant", "<|message|>"],
        ),
    ],
)
def test_marks_of_chat_templates_show_the_question(tmp_path, opens, says):
    """Pieces in brackets are control tokens; all others are tokens of single bytes."""
    marks = sorted({one for one in (*opens, *says) if one[0] in "<["})
    types = [TokenType.NORMAL] * 256 + [TokenType.CONTROL] * len(marks)
    spelled = [*byte_tokens(), *marks]
    fields = {"tokenizer_pre": "gpt-2", "token_merges": ["a b"]}
    turn = [*opens, STORY, *says, "so it is. ", says[0]]
    pieces = [*turn, *turn, *opens, "where is the dog?", *says]
    tokens = [
        one
        for piece in pieces
        for one in ([256 + marks.index(piece)] if piece in marks else piece.encode())
    ]
    llama = opened_vocabulary(tmp_path / "model.gguf", "gpt2", spelled, types, **fields)
    with contextlib.closing(llama):
        found = prompt_of(np.array(tokens, np.int32), vocabulary_of(llama))
    assert question(found).startswith("where is the dog?")
    left = [word for word, kept in zip(found.words, found.is_protected, strict=True) if not kept]
    assert "".join(left).replace(" ", "") == f"{STORY}soitis.{STORY}soitis.".replace(" ", "")
