"""Scorers that evaluate a prompt: what they find, and that they leave no trace."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from llama_cpp import Llama
from low_rank import matrices_of, random_terms, write_lora_of
from preparing import prepare

from llmaas_hooks import LlmaasError, hookimpl, request_scope
from llmaas_hooks.request_scope import serving_context
from llmaas_plugins import activate, elastic
from llmaas_plugins.model.forward import log_softmax
from llmaas_plugins.short_prompts.protection import prompt_of
from llmaas_plugins.short_prompts.scorers import SCORERS
from llmaas_plugins.short_prompts.vocabulary import vocabulary_of

STORY = "The dog went out. It saw Anna near the sea, and she gave it 42 biscuits. " * 6
PROMPT = f"User: {STORY}\nAssistant: So it did.\nUser: How many biscuits?\nAssistant:"
EVALUATING = sorted(name for name, make in SCORERS.items() if make({}).uses_model)


class Scoring:
    """Plugin that scores each prompt and shortens none."""

    def __init__(self, name=None):
        self.natives, self.found, self.logits = {}, [], []
        self._scorer = None if name is None else SCORERS[name](self.natives)

    @hookimpl
    def llmaas_native_context(self, context):
        self.natives[context.ctx] = context

    @hookimpl
    def llmaas_context_free(self, ctx):
        self.natives.pop(ctx, None)

    @hookimpl
    def llmaas_shorten(self, request, share):
        llama = request.engine.llama
        if self._scorer is not None:
            prompt = prompt_of(request.tokens, vocabulary_of(llama))
            level = self.natives[request.engine.ctx].level
            self.found.append(self._scorer.scores(prompt, llama))
            assert self.natives[request.engine.ctx].level == level

    @hookimpl
    def llmaas_logits(self, view):
        self.logits.append(view.logits.copy())


@pytest.fixture(scope="module")
def model(light_model, tmp_path_factory):
    return prepare(light_model, tmp_path_factory.mktemp("prepared") / "model.gguf")


@pytest.fixture
def opened(model):
    """Return a function that opens an engine with a plugin of the test, and with others."""

    @contextlib.contextmanager
    def start(plugin, path=model, *, logits_all=False, own=None, **plugins):
        config = {"plugins": {"elastic": {"table": "uniform"}, **plugins}}
        own = {"n_ctx": 1024, "verbose": False, "n_threads": 1, "n_threads_batch": 1} | (own or {})
        with (
            activate(config, {"scoring": plugin}),
            contextlib.closing(Llama(str(path), logits_all=logits_all, **own)) as llama,
        ):
            yield llama

    return start


def prompt_on(llama, text=PROMPT):
    tokens = np.array(llama.tokenize(text.encode()), np.int32)
    return prompt_of(tokens, vocabulary_of(llama))


def states(llama, plugin):
    """Return all that two requests, the second of which goes on from the first, leave behind."""
    with plugin.natives[int(llama.ctx)].density() as density:
        for text in (PROMPT, f"{PROMPT} Many. User: And then?\nAssistant:"):
            tokens = llama.tokenize(text.encode())
            for n, _token in enumerate(llama.generate(tokens, temp=0.0), 1):
                if n == 3:
                    break
        sums, counts = density.read(llama.n_tokens)
    state = llama.save_state()
    return (
        [row.tobytes() for row in plugin.logits],
        llama.input_ids[: llama.n_tokens].tolist(),
        bytes(state.llama_state[: state.llama_state_size]),
        sums.tolist(),
        counts.tolist(),
    )


@pytest.mark.parametrize("name", EVALUATING)
@pytest.mark.parametrize("share", [None, 0.3])
def test_a_scored_request_leaves_no_trace(opened, name, share):
    """Logits, records, cells and the app's taps are those of a run without a scorer."""
    found = []
    for plugin in (Scoring(), Scoring(name)):
        with opened(plugin) as llama, elastic.level(1.0 if share is None else share):
            found.append(states(llama, plugin))
    assert len(plugin.found) == 2
    assert found[0] == found[1]


@pytest.mark.parametrize("name", EVALUATING)
def test_stored_contexts_are_restored_as_without_a_scorer(opened, tmp_path, name):
    found = []
    for plugin in (Scoring(), Scoring(name)):
        store = {"store": str(tmp_path / str(len(found)))}
        with opened(plugin, kv_chunks=store) as llama:
            for app in ("mail", "notes", "mail"):
                with serving_context(None, app):
                    llama(f"{app}: {PROMPT}", max_tokens=3, temperature=0)
        found.append([row.tobytes() for row in plugin.logits])
    assert len(plugin.found) == 3
    assert found[0] == found[1]


def test_self_information_is_that_of_the_narrowest_level(opened):
    plugin = Scoring()
    with opened(plugin, logits_all=True) as llama, elastic.level(0.2):
        prompt = prompt_on(llama)
        scores = SCORERS["self_information"](plugin.natives).scores(prompt, llama)
        llama.eval(prompt.tokens.tolist())
        expected = log_softmax(llama.scores[: len(prompt.tokens) - 1].astype(np.float64))
    own = -expected[np.arange(len(expected)), prompt.tokens[1:]]
    by_word = np.add.reduceat(np.append(0, own), prompt.starts[:-1])
    np.testing.assert_allclose(scores, by_word, rtol=1e-4, atol=1e-3)


def test_attention_is_that_of_the_question_at_the_narrowest_level(opened):
    plugin = Scoring()
    with opened(plugin) as llama, elastic.level(0.2):
        prompt = prompt_on(llama)
        scores = SCORERS["attention"](plugin.natives).scores(prompt, llama)
        tokens, first = prompt.tokens.tolist(), int(prompt.starts[prompt.question])
        with plugin.natives[int(llama.ctx)].density() as density:
            llama.eval(tokens[:first])
            density.take(first)
            llama.eval(tokens[first:])
            sums, counts = density.read(len(tokens))
    wide = np.pad(sums / counts, 6, constant_values=np.nan)
    smooth = [np.nanmean(wide[at : at + 13]) for at in range(len(tokens))]
    spans = zip(prompt.starts[:-1], prompt.starts[1:], strict=True)
    expected = [np.mean(smooth[start:end]) for start, end in spans]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_a_model_without_levels_is_evaluated_whole(opened, light_model):
    plugin = Scoring()
    with opened(plugin, path=light_model, logits_all=True) as llama:
        prompt = prompt_on(llama)
        assert plugin.natives[int(llama.ctx)].n_levels == 1
        scores = SCORERS["self_information"](plugin.natives).scores(prompt, llama)
        llama.eval(prompt.tokens.tolist())
        rows = log_softmax(llama.scores[: len(prompt.tokens) - 1].astype(np.float64))
    own = -rows[np.arange(len(rows)), prompt.tokens[1:]]
    assert scores.sum() == pytest.approx(own.sum(), rel=1e-4)


def test_the_apps_adapter_is_evaluated_too(opened, light_model, tmp_path):
    """Words are judged by the model that answers."""
    terms = random_terms(light_model, r"blk\.\d+\.ffn_up\.weight", size=2.0)
    lora = write_lora_of(matrices_of(terms, light_model), tmp_path / "lora.gguf")
    plugin = Scoring()
    with opened(plugin, light_model, logits_all=True, own={"lora_path": str(lora)}) as llama:
        prompt = prompt_on(llama)
        scores = SCORERS["self_information"](plugin.natives).scores(prompt, llama)
        llama.eval(prompt.tokens.tolist())
        rows = log_softmax(llama.scores[: len(prompt.tokens) - 1].astype(np.float64))
    own = -rows[np.arange(len(rows)), prompt.tokens[1:]]
    assert scores.sum() == pytest.approx(own.sum(), rel=1e-4)
    with opened(Scoring(), light_model) as llama:
        plain = SCORERS["self_information"](plugin.natives).scores(prompt, llama)
    assert scores.sum() != pytest.approx(plain.sum(), rel=0.01)


@pytest.mark.parametrize("name", EVALUATING)
def test_a_request_that_ends_ends_its_evaluation(opened, monkeypatch, name):
    """Whoever serves the request is asked before each batch."""
    monkeypatch.setattr("llmaas_plugins.short_prompts.scorers.evaluation._MOST_BATCH", 16)
    plugin, left = Scoring(), [None] * 2

    def check():
        left.pop()  # an IndexError after two batches

    with opened(plugin) as llama:
        scorer, prompt = SCORERS[name](plugin.natives), prompt_on(llama)
        with request_scope.checked_by(check), pytest.raises(IndexError):
            scorer.scores(prompt, llama)
        assert list(plugin.natives) == [int(llama.ctx)]
        assert scorer.seconds(100) is None
        assert len(scorer.scores(prompt, llama)) == len(prompt.words)


def test_long_prompts_are_evaluated_in_batches(opened, monkeypatch):
    plugin = Scoring()
    with opened(plugin) as llama:
        prompt = prompt_on(llama)
        whole = {name: SCORERS[name](plugin.natives).scores(prompt, llama) for name in EVALUATING}
        monkeypatch.setattr("llmaas_plugins.short_prompts.scorers.evaluation._MOST_BATCH", 64)
        for name, expected in whole.items():
            found = SCORERS[name](plugin.natives).scores(prompt, llama)
            np.testing.assert_allclose(found, expected, rtol=0.05, atol=1e-4)


@pytest.mark.parametrize("name", EVALUATING)
def test_the_time_of_prompts_is_measured(opened, name):
    plugin = Scoring()
    with opened(plugin) as llama:
        scorer = SCORERS[name](plugin.natives)
        assert scorer.seconds(100) is None
        scorer.scores(prompt_on(llama), llama)
        assert 0 < scorer.seconds(100) < scorer.seconds(1000)


def test_attention_needs_a_hook_point(packaged_model):
    with contextlib.closing(Llama(str(packaged_model), n_ctx=512, verbose=False)) as llama:
        prompt = prompt_on(llama, "User: a short story\nAssistant:")
        assert SCORERS["self_information"]({}).scores(prompt, llama).max() > 1
        with pytest.raises(LlmaasError, match="attention cannot be read: the engine has no hook"):
            SCORERS["attention"]({}).scores(prompt, llama)


class WithoutLayers(dict):
    """Contexts of which no layer has attention."""

    def get(self, ctx):
        native = self[ctx]
        return SimpleNamespace(
            n_levels=native.n_levels,
            hold_level=native.hold_level,
            density=lambda: native.density(layer_step=99),
        )


def test_models_without_attention_are_refused(opened):
    plugin = Scoring()
    plugin.natives = WithoutLayers()
    with opened(plugin) as llama:
        prompt = prompt_on(llama)
        with pytest.raises(LlmaasError, match="attention cannot be read: this model has none"):
            SCORERS["attention"](plugin.natives).scores(prompt, llama)


@pytest.mark.parametrize("name", EVALUATING)
def test_a_failed_evaluation_says_so_and_frees_its_context(opened, monkeypatch, name):
    plugin = Scoring()
    with opened(plugin) as llama, monkeypatch.context() as patch:
        prompt, scorer = prompt_on(llama), SCORERS[name](plugin.natives)
        patch.setattr("llama_cpp.llama_cpp.llama_decode", lambda _ctx, _batch: 7)
        with pytest.raises(LlmaasError, match="llama_decode returned 7 while the words were"):
            scorer.scores(prompt, llama)
        assert list(plugin.natives) == [int(llama.ctx)]
        assert scorer.seconds(100) is None


def test_a_context_that_there_is_no_memory_for_is_an_error(opened, monkeypatch):
    plugin = Scoring()
    with opened(plugin) as llama, monkeypatch.context() as patch:
        prompt = prompt_on(llama)
        patch.setattr("llama_cpp.llama_cpp.llama_init_from_model", lambda *_: None)
        with pytest.raises(LlmaasError, match=r"no memory for a context of 256 tokens to score"):
            SCORERS["attention"](plugin.natives).scores(prompt, llama)
