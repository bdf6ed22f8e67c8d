"""The first message that the model sees of a context, and the lengths that decide it."""

from __future__ import annotations

import itertools

import pytest

from llmaas_plugins.service.window import prompt_length, slide, visible

LIMIT, ROOM = 100, 20


def conversation(*turns, system=0):
    """Return messages, and their prompt length from a message on; a number is a length."""
    lengths = [system] if system else []
    messages = [{"role": "system", "content": ""}] if system else []
    for said, answered in itertools.zip_longest(turns[::2], turns[1::2]):
        for role, n in (("user", said), ("assistant", answered)):
            if n is not None:
                messages.append({"role": role, "content": ""})
                lengths.append(n)
    return messages, lambda start: sum(
        n for i, n in enumerate(lengths) if i >= start or (system and i == 0)
    )


def start_of(turns, start=0):
    messages, length = conversation(*turns)
    return slide(messages, start, LIMIT, ROOM, length)


def test_as_long_as_there_is_room_everything_is_seen():
    assert start_of([80]) == 0
    assert start_of([30, 40, 10]) == 0


def test_then_half_of_the_window_is_freed_in_whole_turns():
    turns = [10, 10] * 4 + [5]  # 85 of 80
    assert start_of(turns) == 4  # two turns stay, 45 tokens; three would be 65
    assert start_of([*turns, 5, 5], start=4) == 4  # there is room again
    assert start_of([10, 10] * 6 + [5], start=4) == 8


def test_the_system_prompt_stays():
    messages, length = conversation(*[10, 10] * 4, 5, system=10)
    start = slide(messages, 0, LIMIT, ROOM, length)
    assert (start, length(start)) == (7, 35)  # with one turn more it would be 55
    seen = visible(messages, start)
    assert [m["role"] for m in seen] == ["system", "user", "assistant", "user"]


def test_the_turn_before_the_prompt_stays_if_it_leaves_room():
    assert start_of([10, 10, 30, 30, 5]) == 2  # 65 tokens stay, more than half of the window
    assert start_of([10, 10, 30, 30, 25]) == 4  # 85 would leave no room for the reply


def test_a_prompt_without_turns_before_it_stays():
    assert start_of([99]) == 0
    assert start_of([10, 10, 99]) == 2
    assert start_of([10, 10, 99], start=2) == 2


@pytest.mark.parametrize("chat_format", [None, "llama-2", "chatml", "zephyr"])
def test_a_prompt_is_as_long_as_llama_cpp_makes_it(make_llama, chat_format):
    llama = make_llama(chat_format=chat_format)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grüße, 世界 🦙"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Why?"},
    ]
    for start in (0, 3):
        seen = visible(messages, start)
        found = prompt_length(llama, seen, {"max_tokens": 5, "stop": ["x"]})
        assert llama.n_tokens == 0  # nothing was evaluated
        done = llama.create_chat_completion(messages=seen, max_tokens=1)
        assert found == done["usage"]["prompt_tokens"] > 5
        llama.reset()


def test_wrong_arguments_are_said_as_by_llama_cpp(make_llama):
    with pytest.raises(TypeError, match="temprature"):
        prompt_length(make_llama(), [], {"temprature": 0.0})


def test_a_chat_handler_of_the_apps_own_may_work_with_the_engine(make_llama):
    llama = make_llama()

    def evaluate(*, llama, **_):
        llama.eval([1, 2, 3])
        pytest.fail("only the app's own call may get here")

    llama.chat_handler = evaluate
    assert prompt_length(llama, [], {}) == 0
