"""Messages as tokens, by the formats that models come with."""

from __future__ import annotations

import pytest
from llama_cpp import Llama, llama_chat_format
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from llmaas_plugins.chats.prompts import conversation_tokens, prompt_tokens

FORMATS = ["chat_template.default", "chatml", "llama-2", "llama-3", "gemma", "vicuna", "zephyr"]
FORMATS += ["mistral-instruct", "oasst_llama", "alpaca", "phind"]

ASKED = [{"role": "user", "content": "Where is my dog?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "In the garden"}]
ASKED_AGAIN = [*ANSWERED, {"role": "user", "content": "And why?"}]
ANSWERED_AGAIN = [*ASKED_AGAIN, {"role": "assistant", "content": "It likes cats"}]

SPECIAL = (
    "{% for m in messages %}<s>{{ m.role + '\n' + m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
"""chatml as in models made for it: turns end with a token of its own."""
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}</s>{% endfor %}"
)


@pytest.fixture(scope="module")
def llama(reference_model):
    llama = Llama(str(reference_model), n_ctx=64, verbose=False, n_threads=1, vocab_only=True)
    yield llama
    llama.close()


@pytest.fixture
def speaking(llama, monkeypatch):
    """Return a function that gives the model a chat format or a template."""

    def speaking(name, template=None):
        monkeypatch.setattr(llama, "chat_format", name)
        if template is not None:
            formatter = Jinja2ChatFormatter(template, eos_token="</s>", bos_token="<s>")
            monkeypatch.setitem(llama._chat_handlers, name, formatter.to_chat_handler())
        return llama

    return speaking


def text_of(llama, tokens):
    return llama.detokenize(tokens, special=True).decode()


@pytest.mark.parametrize("name", FORMATS)
def test_prompt_is_what_the_engine_would_get(speaking, name, monkeypatch):
    llama = speaking(name)
    monkeypatch.setattr(llama, "create_completion", lambda prompt, **_: prompt)
    monkeypatch.setattr(
        llama_chat_format, "_convert_completion_to_chat", lambda prompt, **_: prompt
    )
    engine_gets = llama.create_chat_completion(ASKED_AGAIN)
    monkeypatch.undo()
    assert prompt_tokens(speaking(name), ASKED_AGAIN, {}) == engine_gets


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("messages", [ANSWERED, ANSWERED_AGAIN], ids=["one turn", "two turns"])
def test_a_conversation_ends_with_its_last_turn(speaking, name, messages):
    llama = speaking(name)
    tokens, prompt = conversation_tokens(llama, messages), prompt_tokens(llama, messages, {})
    assert tokens == prompt[: len(tokens)]
    before, after = text_of(llama, tokens).rsplit(messages[-1]["content"], 1)
    assert before.startswith(text_of(llama, prompt_tokens(llama, messages[:-1], {})).rstrip(" "))
    assert after in {"</s>", " </s>", "\n", "<"}  # the first piece of a name that it cannot spell


@pytest.mark.parametrize("name", FORMATS)
def test_a_conversation_begins_as_the_prompt_that_its_last_turn_answered(speaking, name):
    llama = speaking(name)
    asked = prompt_tokens(llama, ASKED_AGAIN, {})
    tokens = conversation_tokens(llama, ANSWERED_AGAIN)
    assert tokens[: len(asked)] == asked
    first = conversation_tokens(llama, ANSWERED)
    assert tokens[: len(first)] == first


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("llama-2", "In the garden </s>"),
        ("mistral-instruct", "In the garden</s>"),
        ("mistrallite", "In the garden </s>"),
        ("vicuna", "In the garden</s>"),
        ("zephyr", "In the garden</s>"),
        ("alpaca", "In the garden</s>"),
        ("chat_template.default", "\nAssistant: In the garden\n"),
    ],
)
def test_the_token_that_ends_a_turn_stays(speaking, name, end):
    llama = speaking(name)
    assert text_of(llama, conversation_tokens(llama, ANSWERED)).endswith(end)


def test_the_template_in_the_gguf_may_end_turns_with_a_token_of_its_own(speaking):
    llama = speaking("special", SPECIAL)
    tokens = conversation_tokens(llama, ANSWERED)
    assert text_of(llama, tokens).endswith("In the garden</s>")
    assert tokens[-1] == llama.token_eos()
    assert text_of(llama, prompt_tokens(llama, ANSWERED, {})).endswith("assistant\n")


def test_a_question_without_an_answer_waits_for_it(speaking):
    llama = speaking("chatml")
    assert conversation_tokens(llama, ASKED) == prompt_tokens(llama, ASKED, {})
    assert text_of(llama, conversation_tokens(llama, ASKED)).endswith("assistant\n")


def test_a_format_that_leaves_answers_out_is_taken_as_it_is(speaking):
    llama = speaking("deaf", "{{ messages[0].content }}</s>")
    assert conversation_tokens(llama, ANSWERED) == prompt_tokens(llama, ANSWERED, {})


def test_what_a_template_refuses_is_refused(speaking):
    llama = speaking("strict", STRICT)
    assert text_of(llama, conversation_tokens(llama, ANSWERED)).endswith("In the garden</s>")
    with pytest.raises(ValueError, match="roles must alternate"):
        conversation_tokens(llama, [*ASKED, *ASKED, ANSWERED[1]])


def test_handler_that_works_with_the_engine_itself_makes_no_tokens(llama, monkeypatch):
    def handler(*, llama, **_):
        return llama.eval([1])

    monkeypatch.setattr(llama, "chat_handler", handler)
    assert prompt_tokens(llama, ASKED, {}) is None
    assert conversation_tokens(llama, ANSWERED) is None


def test_options_reach_the_chat_handler(llama, monkeypatch):
    def handler(*, llama, **options):
        return llama.create_completion(prompt=[options["seed"]])

    monkeypatch.setattr(llama, "chat_handler", handler)
    assert prompt_tokens(llama, ASKED, {"seed": 7}) == [7]
