"""Conversations become pairs: the engine's own states, each target once, one chat at a time."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from families import write_family
from llama_cpp import Llama
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from llmaas_eval.families import write_lora
from llmaas_hooks import LlmaasError, hookimpl
from llmaas_plugins import activate
from llmaas_plugins._native import LogitsInfo
from llmaas_plugins.chats.exports import Conversation, Message
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.files import SELECTED
from llmaas_plugins.knn_lm.build import encoder as encoding
from llmaas_plugins.knn_lm.build.archive_source import SelectionParams
from llmaas_plugins.knn_lm.build.build_datastore import build_datastore
from llmaas_plugins.knn_lm.build.encoder import Encoder
from llmaas_plugins.knn_lm.build.ingest import add_conversations, binding_of, tokens_of
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.mixing.mixture import Mixture

KEYS = ["ffn_input", "final_norm"]
ENGINE = {"n_ctx": 512, "flash_attn": True, "logits_all": True}
HALF = 2.0**-11  # relative error of float16

DISHES = ("soup", "rice", "fish", "salad", "cake", "bread", "pasta", "curry", "stew", "pizza")
PLACES = ("Rome", "Oslo", "Lima", "Cairo", "Delhi", "Paris", "Tokyo", "Quito", "Seoul", "Berlin")


def chat(question, answer):
    return Conversation(question, "chat", (Message("user", question), Message("assistant", answer)))


CHATS = [
    *(
        chat(
            f"How do I make {dish}?",
            f"To make {dish}, you need salt, water and a large pot. "
            f"Heat the water in the pot, add the salt, and let the {dish} rest for ten minutes.",
        )
        for dish in DISHES
    ),
    *(
        chat(
            f"How do I get to {place}?",
            f"To get to {place}, you take the train to the airport. "
            f"From the airport there is a flight to {place} at ten in the morning.",
        )
        for place in PLACES
    ),
]


class Natives(dict):
    """Plugin that collects contexts whose hidden states can be read, by address."""

    @hookimpl
    def llmaas_native_context(self, context):
        self[context.ctx] = context


@pytest.fixture
def natives():
    """Collect contexts while no other plugin is active."""
    natives = Natives()
    with activate({"on_error": "raise", "plugins": {}}, {"natives": natives}):
        yield natives


@pytest.fixture
def encoder(natives):
    """Return a function that makes an encoder beside an engine; closed when the test ends."""
    with contextlib.ExitStack() as opened:
        yield lambda llama, key="ffn_input", **settings: opened.enter_context(
            Encoder(llama, natives, key, **settings)
        )


@pytest.fixture
def archive(tmp_path):
    """Return a function that opens an archive for an engine, to write."""
    return lambda llama, key="ffn_input", name="store": Archive.open(
        tmp_path / name, binding_of(llama, key), writable=True
    )


def named(conversations):
    return [(one, "export.json") for one in conversations]


def watched(llama, natives, key, tokens):
    """Return hidden states and logits of all tokens in the app's own context."""
    with natives[int(llama.ctx)].hidden_states(key, capacity=len(tokens)) as states:
        llama.reset()
        llama.eval(tokens)
        return states.take(), np.array(llama.scores[: len(tokens)])


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def assert_as_in_the_app(found, states, logits, tokens):
    """Compare pairs with the app's own context after each token but the last."""
    targets = np.array(tokens[1:])
    assert found.positions.tolist() == list(range(1, len(tokens)))
    assert np.array_equal(found.pairs.values, targets)
    error = np.abs(found.pairs.keys.astype(np.float32) - states[:-1])
    assert (error <= HALF * np.abs(states[:-1]) + 1e-4).all()
    logs = log_softmax(logits[:-1])
    assert np.allclose(np.log(found.pairs.p_lm), logs[np.arange(len(targets)), targets], atol=1e-3)
    assert np.allclose(np.log(found.pairs.p_max), logs.max(axis=1), atol=1e-3)
    assert (found.pairs.p_lm <= found.pairs.p_max * (1 + 1e-5)).all()


# -- one conversation ----------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
def test_pairs_are_what_the_apps_own_context_says(make, natives, encoder, key):
    llama = make(**ENGINE)
    tokens = tokens_of(llama, CHATS[0])
    found = encoder(llama, key).encode(tokens)
    assert_as_in_the_app(found, *watched(llama, natives, key, tokens.tolist()), tokens.tolist())


@pytest.mark.parametrize("key", KEYS)
def test_keys_of_both_kinds_are_different_states(make, encoder, key):
    llama = make(**ENGINE)
    tokens = tokens_of(llama, CHATS[0])
    mine, other = (encoder(llama, kind).encode(tokens).pairs for kind in KEYS)
    assert not np.allclose(mine.keys, other.keys, atol=0.1)
    assert np.array_equal(mine.p_lm, other.p_lm)


@pytest.mark.parametrize("name", ["gemma3", "llama-moe", "llama with an adapter"])
def test_pairs_of_other_models(natives, encoder, tmp_path, name):
    family = name.split()[0]
    adapter = write_lora(family, tmp_path / "lora") if name != family else None
    model = write_family(family, tmp_path / "model.gguf")
    settings = {"n_threads": 1, "n_threads_batch": 1, "verbose": False, "lora_scale": 0.7}
    with contextlib.closing(
        Llama(str(model), lora_path=adapter and str(adapter), **ENGINE, **settings)
    ) as llama:
        tokens = np.arange(7, 400, 3, dtype=np.int32)
        found = encoder(llama).encode(tokens)
        assert_as_in_the_app(
            found, *watched(llama, natives, "ffn_input", tokens.tolist()), tokens.tolist()
        )
    if adapter:  # the adapter did matter
        with (
            contextlib.closing(Llama(str(model), **ENGINE, **settings)) as bare,
            Encoder(bare, natives, "ffn_input") as other,
        ):
            assert not np.allclose(other.encode(tokens).pairs.keys, found.pairs.keys, atol=0.05)


def test_batches_of_a_window_are_seams_that_do_not_show(make, natives, encoder):
    llama, calls = make(**ENGINE, n_batch=32, n_ubatch=32), []
    tokens = np.concatenate([tokens_of(llama, one) for one in CHATS])
    tokens = tokens[: 2 * 32 + 1]  # the last batch is a single token, without a target
    found = encoder(llama, n_batch=32).encode(tokens, lambda: calls.append(None))
    assert len(calls) == 3
    states, logits = watched(llama, natives, "ffn_input", tokens.tolist())
    assert_as_in_the_app(found, states, logits, tokens.tolist())


def test_conversation_longer_than_the_context_gives_every_target_once(make, encoder):
    llama = make(n_ctx=256)
    encode = encoder(llama, n_batch=64).encode
    tokens = np.concatenate([tokens_of(llama, one) for one in CHATS])[:700]
    found = encode(tokens)
    assert found.positions.tolist() == list(range(1, 700))
    assert np.array_equal(found.pairs.values, tokens[1:])
    first, second = encode(tokens[:256]).pairs, encode(tokens[128:384]).pairs
    assert np.array_equal(found.pairs.keys[:255], first.keys)
    assert np.array_equal(found.pairs.p_lm[:255], first.p_lm)
    assert np.array_equal(found.pairs.keys[255:383], second.keys[127:])
    assert np.array_equal(found.pairs.p_lm[255:383], second.p_lm[127:])


def test_progress_within_a_long_conversation_is_told(make, encoder, archive):
    llama, told = make(n_ctx=256), []
    messages = tuple(message for chat in CHATS for message in chat.messages)
    long, made = Conversation("long", "chat", messages), encoder(llama, n_batch=64)
    with archive(llama) as store:
        add_conversations(store, llama, made, [(long, "test")], progress=told.append)
    assert sum(told) == long.n_characters > 2000
    assert 0 <= min(told) <= max(told) < 500


@pytest.mark.parametrize("n_tokens", [0, 1])
def test_where_there_is_no_target_there_is_no_pair(make, encoder, n_tokens):
    llama = make()
    found = encoder(llama).encode(np.zeros(n_tokens, np.int32))
    assert len(found.positions) == len(found.pairs) == 0
    assert found.pairs.n_embd == llama.n_embd()


def test_target_that_has_no_chance_has_a_logarithm_all_the_same(make, encoder, monkeypatch):
    monkeypatch.setattr(encoding, "logits_peek", lambda _row: LogitsInfo(1e6, 1.0))
    llama = make()
    found = encoder(llama).encode(tokens_of(llama, CHATS[0]))
    assert np.isfinite(np.log(found.pairs.p_lm)).all()


@pytest.mark.parametrize("when", ["before", "between"])
def test_the_apps_context_is_left_as_it_is(make, encoder, when):
    texts = [make().tokenize(one.messages[1].content.encode()) for one in CHATS[:2]]

    def next_logits(llama, meanwhile):
        llama.eval(texts[0][:20])
        meanwhile(llama)
        llama.eval(texts[0][20:])
        return llama.scores[: len(texts[0])].copy(), llama.save_state().llama_state

    wanted = next_logits(make(**ENGINE), lambda _llama: None)
    llama = make(**ENGINE)
    encode = encoder(llama).encode
    if when == "before":
        encode(tokens_of(llama, CHATS[1]))
        found = next_logits(llama, lambda _llama: None)
    else:
        found = next_logits(llama, lambda llama: encode(tokens_of(llama, CHATS[1])))
    assert np.array_equal(found[0], wanted[0])
    assert found[1] == wanted[1]


def test_without_a_hook_point_it_says_so(make):
    with pytest.raises(
        LlmaasError, match=r"the engine has no hook point\. `llmaas doctor` says why"
    ):
        Encoder(make(), {}, "ffn_input")


def test_closing_twice_is_closing_once(make, natives):
    encoder = Encoder(make(), natives, "ffn_input")
    encoder.close()
    encoder.close()


# -- an archive of them --------------------------------------------------------------------------


def test_what_is_in_already_is_not_added_again(make, encoder, archive):
    llama, told = make(), []
    with archive(llama) as store:
        added = add_conversations(
            store, llama, encoder(llama), named(CHATS[:3]), progress=told.append
        )
        n_bytes = store.n_bytes
        assert (added.n_added, added.n_known, added.n_pairs) == (3, 0, store.n_pairs)
        again = add_conversations(store, llama, encoder(llama), named([*CHATS[1:4], CHATS[3]]))
        assert (again.n_added, again.n_known) == (1, 3)
        assert store.n_pairs == added.n_pairs + again.n_pairs
        assert again.n_pairs > 0
        assert add_conversations(store, llama, encoder(llama), named(CHATS[:4])).n_pairs == 0
        assert n_bytes < store.n_bytes
        assert sum(told) == sum(chat.n_characters for chat in CHATS[:3])
        assert [info.title for info in store.conversations()] == [one.title for one in CHATS[:4]]
        assert all(
            np.array_equal(store.tokens(id_), tokens_of(llama, one))
            for id_, one in zip(store.ids(), CHATS, strict=False)
        )


@pytest.mark.parametrize("last", [0, 1, 2, 5])
def test_what_was_ended_goes_on_with_the_rest(make, encoder, archive, last):
    llama, calls = make(), []
    few = {"n_batch": 32}  # a chat then takes several batches

    def between():
        calls.append(None)
        if len(calls) > last:
            raise KeyboardInterrupt

    with archive(llama) as store:
        with pytest.raises(KeyboardInterrupt):
            add_conversations(
                store, llama, encoder(llama, **few), named(CHATS[:5]), between=between
            )
        n_whole = len(store)
        assert n_whole <= last
        n_tokens = sum(len(tokens) for tokens in store.token_sequences())
        assert store.n_pairs == n_tokens - n_whole
    with archive(llama) as store:
        rest = add_conversations(store, llama, encoder(llama, **few), named(CHATS[:5]))
        assert (rest.n_known, rest.n_added) == (n_whole, 5 - n_whole)
    with archive(llama) as ended, archive(llama, name="in one go") as whole:
        add_conversations(whole, llama, encoder(llama, **few), named(CHATS[:5]))
        assert ended.ids() == whole.ids()
        every = np.arange(whole.n_pairs)
        mine, wanted = ended.pairs(every), whole.pairs(every)
        assert np.array_equal(mine.keys, wanted.keys)
        assert np.array_equal(mine.p_lm, wanted.p_lm)


def test_what_the_chat_template_does_not_take_does_not_stop_the_others(
    make, encoder, archive, caplog
):
    llama = make()
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}</s>{% endfor %}"
    )
    formatter = Jinja2ChatFormatter(template, eos_token="</s>", bos_token="<s>")
    llama.chat_handler = formatter.to_chat_handler()
    asked_twice = Conversation("impatient", "chat", (Message("user", "Hello?"),) * 2)
    with archive(llama) as store:
        added = add_conversations(
            store, llama, encoder(llama), named([CHATS[0], asked_twice, CHATS[1]])
        )
        assert (added.n_added, added.n_refused, len(store)) == (2, 1, 2)
    assert "refuses conversation 'impatient': roles must alternate" in caplog.text


def test_conversation_of_a_single_token_is_too_short(make, encoder, archive):
    llama = make()
    formatter = Jinja2ChatFormatter("{{ bos_token }}", eos_token="</s>", bos_token="<s>")
    llama.chat_handler = formatter.to_chat_handler()
    with archive(llama) as store:
        assert add_conversations(store, llama, encoder(llama), named(CHATS[:2])).n_left_out == 2
        assert len(store) == 0


def test_conversation_with_states_beyond_float16_is_left_out(make, encoder, archive, monkeypatch):
    llama = make()
    made = encoder(llama)
    encode, n_calls = made.encode, []

    def too_large(tokens, **told):
        n_calls.append(None)
        found = encode(tokens, **told)
        found.pairs.keys[3, 7] *= np.inf if len(n_calls) == 1 else 1
        return found

    monkeypatch.setattr(made, "encode", too_large)
    with archive(llama) as store:
        added = add_conversations(store, llama, made, named(CHATS[:2]))
        assert (added.n_added, added.n_left_out, len(store)) == (1, 1, 1)


def test_chat_handler_that_makes_no_tokens_is_refused(make):
    llama = make()
    llama.chat_handler = lambda *, llama, **_: llama.eval([1])
    with pytest.raises(
        LlmaasError, match="makes no text prompt of conversation 'How do I make soup"
    ):
        tokens_of(llama, CHATS[0])


# -- the datastore that is searched --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("n_dims", [64, 256], ids=["in few directions", "in all"])
def test_selected_datastore_of_chats_is_worth_having(make, encoder, archive, n_dims, tmp_path):
    llama = make()
    with archive(llama) as store:
        n_full = add_conversations(store, llama, encoder(llama), named(CHATS)).n_pairs
        told = []
        found = build_datastore(
            store, SelectionParams(size=n_full // 3, k=20, n_dims=n_dims), told.append
        )
        assert (found.n_pairs, found.n_full, sum(told)) == (n_full // 3, n_full, n_full // 3)
        assert found.perplexity < 0.84 * found.perplexity_alone
        assert 0.5 <= found.skip_above <= 1
        assert 0 <= found.skipped < 1
        searched = Datastore.open(tmp_path / "store" / SELECTED, store.binding.fingerprint)
        assert Mixture.from_json(searched.settings["mixture"]) == found.mixture
        rest = {name: searched.settings[name] for name in ("k", "skip_above", "key")}
        assert rest == {"k": 20, "skip_above": found.skip_above, "key": "ffn_input"}
        ids = [id_.hex() for id_ in store.ids()]
        tokens = store.token_sequences()
        for value, (number, position) in zip(searched.values, searched.origins, strict=True):
            assert tokens[ids.index(searched.conversations[number])][position] == value
        pair = store.pairs(np.array([0]))
        nearest = searched.search(pair.keys[0].astype(np.float32), 5)
        assert (np.diff(nearest.distances) >= 0).all()
        searched.close()


def test_of_one_conversation_nothing_can_be_held_out(make, encoder, archive):
    llama = make()
    with archive(llama) as store:
        add_conversations(store, llama, encoder(llama), named(CHATS[:1]))
        found = build_datastore(store, SelectionParams(size=10))
    assert math.isnan(found.perplexity)
    assert (found.skip_above, found.skipped) == (1.0, 0.0)
    assert found.mixture.alpha < 0.5
    assert found.mixture.far < math.inf
