"""guidance, unmodified: it evaluates its own batches, so its contexts are never kept."""

from __future__ import annotations

import json

import pytest

pytestmark = [
    pytest.mark.slow,  # its import takes a second
    pytest.mark.filterwarnings("ignore:llama_token_get_attr is deprecated:DeprecationWarning"),
    pytest.mark.compat("clients", "guidance", "same as vanilla", "yes"),
]


def cell(column, says="yes"):
    return pytest.mark.compat("clients", "guidance", column, says)


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model: guidance loses count of cells where noise is tokenized anew."""
    return packaged_model


@pytest.fixture
def guidance():
    return pytest.importorskip("guidance")


@pytest.fixture
def on(guidance):
    """Make guidance's model on an engine."""
    from guidance.chat import ChatMLTemplate

    return lambda llama: guidance.models.LlamaCpp(llama, echo=False, chat_template=ChatMLTemplate)


@cell("completion")
@cell("contexts restored", "no")
def test_text(lives, guidance, opened, on, subjects):
    def app():
        with opened() as llama:
            states = [on(llama) + subject for subject in subjects]
            for _ in range(3):
                states = [state + guidance.gen(max_tokens=8) for state in states]
        return [str(state) for state in states]

    run = lives(app)
    assert run.restored == [0, 0]


@cell("chat")
def test_roles(lives, guidance, opened, on, subjects):
    def app():
        with opened() as llama:
            model = on(llama)
            for subject in subjects:
                with guidance.user():
                    model += subject
                with guidance.assistant():
                    model += guidance.gen(max_tokens=8)
        return str(model)

    assert lives(app).result.count("<|im_start|>assistant") == 2


@cell("streaming")
def test_stream(lives, guidance, opened, on, subjects):
    def app():
        # guidance continues in its own thread, so a stream must be read to its end
        with opened() as llama:
            stream = on(llama).stream() + subjects[0] + guidance.gen(max_tokens=8)
            return [str(state) for state in stream]

    assert len(lives(app).result) > 5


@cell("grammar / JSON")
def test_constraints(lives, guidance, opened, on, subjects):
    schema = {
        "type": "object",
        "properties": {"seat": {"enum": ["aisle", "window"]}, "bags": {"enum": [1, 2, 3]}},
        "required": ["seat", "bags"],
        "additionalProperties": False,
    }

    def app():
        with opened() as llama:
            model = on(llama) + subjects[1]
            model += guidance.select(["Rome", "Paris", "Oslo"], name="city")
            model += " at " + guidance.gen(regex=r"\d\d:\d\d", name="time")
            model += ": " + guidance.json(schema=schema, whitespace_flexible=False, name="flight")
        return model["city"], model["time"], model["flight"]

    city, departure, flight = lives(app).result
    assert city in ("Rome", "Paris", "Oslo")
    assert departure[2] == ":"
    assert json.loads(flight)["seat"] in ("aisle", "window")


def complete(llama, prompt):
    return llama(prompt, max_tokens=8, temperature=0.0)["choices"][0]["text"]


def test_an_engine_used_both_ways_in_turn(lives, guidance, opened, on, subjects):
    def app():
        found = []
        with opened() as llama:
            for subject in subjects * 2:
                found.append(str(on(llama) + subject + guidance.gen(max_tokens=8)))
                llama.reset()  # its cells are now guidance's
                found.append(complete(llama, subject))
        return found

    run = lives(app)
    assert min(run.restored) > 0


def test_an_app_that_forgets_the_reset_gets_no_other_answers_later(
    lives, guidance, opened, on, subjects
):
    def app():
        found = []
        with opened() as llama:
            prompt = subjects[0] + complete(llama, subjects[0]) + " And then?"
            str(on(llama) + "?" * 60 + guidance.gen(max_tokens=1))
            found.append(complete(llama, prompt))  # on cells that are not the prompt's
        with opened() as llama:
            found.append(complete(llama, prompt))
        return found

    run = lives(app)
    wrong, right = run.result
    assert wrong != right
    assert min(run.restored) > 0
