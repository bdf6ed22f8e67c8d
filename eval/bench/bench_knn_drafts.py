"""Drafts from stored conversations: whole requests compared with stock llama-cpp-python.

``near`` is about the largest possible gain. The history is the model's own replies to the same
prompts with one token in 50 replaced, so almost every draft is right. The models have random
weights; only their speed is realistic. A slight repeat penalty keeps them from loops, which any
draft model would predict.

``user`` is a realistic gain. The history is 70 % of a user's conversations, the prompts come from
the rest, and the replies are those of the packaged, trained model. That model is so small that a
batch costs hardly more than a token. So a 1 B-shape model is also forced to write the same replies,
at its own cost.

Random-weight models are forced to write given tokens both with and without drafts. They have many
near-ties, which each batch size decides differently.

Prompt lookup is llama-cpp-python's own draft model with its defaults, in place of ours. Batches and
single tokens use all cores.

``LLMAAS_DATA`` names the folder with the users' chat sets, such as ``chat/sgd_dev.jsonl``.
"""

from __future__ import annotations

import contextlib
import os
import time

import numpy as np
import pytest
from drafting import attach, measured_costs
from llama_cpp import Llama, LogitsProcessorList
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from llmaas_eval.data import DATA
from llmaas_eval.knn.users import load, split
from llmaas_eval.paired import compare, repeats
from llmaas_eval.stats import quartiles
from llmaas_plugins.knn_lm.drafts.draft_model import DatastoreDraft

N_PROMPTS, N_REPLY, N_ROUNDS = 4, 64, 6
N_PROMPT_MAX = 200
REPLACED = 1 / 50
PENALTY = 1.1
PROMPTS = (
    "Tell me about your dog and where you found it.",
    "My phone is broken, and I want to fly to Rome.",
    "One pizza with cheese, please, and a table for two.",
    "Why is that? I do not believe a word of it.",
)
N_STORED, N_TALK = 400_000, 400


class Speaker:
    """A model that replies to prompts, greedily or with forced tokens; it counts its passes."""

    def __init__(self, path, *, penalty=1.0, **settings):
        n_threads = {"n_threads": os.cpu_count(), "n_threads_batch": os.cpu_count()}
        self.llama = Llama(str(path), n_ctx=1024, verbose=False, **n_threads, **settings)
        self.penalty, self.costs = penalty, {}
        self.passes = self.evaluated = 0
        self._eval, self.llama.eval = self.llama.eval, self.count

    def count(self, tokens):
        self.passes += 1
        self.evaluated += len(tokens)
        self._eval(tokens)

    def reply(self, prompt, said=None, n_tokens=N_REPLY):
        """Return the reply to ``prompt``; force the tokens ``said`` if given."""
        self.llama.reset()
        self.passes, self.evaluated = self.passes - 1, self.evaluated - len(prompt)
        made = LogitsProcessorList([Made(said)]) if said else None
        stream = self.llama.generate(
            prompt, temp=0.0, repeat_penalty=self.penalty, logits_processor=made
        )
        return [
            token for _, token in zip(range(len(said or range(n_tokens))), stream, strict=False)
        ]


class Made:
    """Logits processor that forces the tokens ``said``.

    Each call takes the next token of ``said``. The text that ``Llama`` passes includes drafts, so
    its length does not tell the position.
    """

    def __init__(self, said):
        self.said = iter(said)

    def __call__(self, input_ids, scores):
        scores[next(self.said)] = 1e9
        return scores


@contextlib.contextmanager
def drafting(path, kind, history, **settings):
    """Open a speaker that uses drafts."""
    if kind == "prompt_lookup":
        draft = LlamaPromptLookupDecoding()
        speaker = Speaker(path, draft_model=draft, logits_all=True, **settings)
    else:
        speaker, draft = Speaker(path, **settings), DatastoreDraft(history)
        attach(speaker.llama, draft)
        draft.costs = speaker.costs = measured_costs(speaker.llama)
    with contextlib.closing(speaker.llama):
        yield speaker


def compare_speakers(benchmark, vanilla, ours, requests):
    """Time both speakers with the same prompts, and record the share of accepted drafts."""
    replies = {}
    ours.passes = ours.evaluated = 0

    def all_replies(speaker):
        replies[speaker] = [speaker.reply(*request) for request in requests]

    compare(benchmark, lambda: all_replies(ours), lambda: all_replies(vanilla), rounds=N_ROUNDS)
    n_requests = len(requests) * (repeats(N_ROUNDS) + 2)
    n_tokens = sum(map(len, replies[ours])) * (repeats(N_ROUNDS) + 2) - n_requests
    benchmark.extra_info.update(
        costs={size: round(cost, 2) for size, cost in ours.costs.items()},
        tokens_per_pass=n_tokens / ours.passes,
        acceptance=(n_tokens - ours.passes) / max(ours.evaluated - ours.passes, 1),
    )
    if len(requests[0]) == 1:  # the models' own replies
        same = sum(a == b for a, b in zip(replies[ours], replies[vanilla], strict=True))
        benchmark.extra_info["same_replies"] = f"{same} of {len(requests)}"


@pytest.mark.parametrize("kind", ["datastore", "prompt_lookup"])
@pytest.mark.parametrize("model", ["model_200m", "model_1b"])
def bench_near(request, benchmark, model, kind):
    path, rng = request.getfixturevalue(model), np.random.default_rng(0)
    vanilla = Speaker(path, penalty=PENALTY)
    prompts = [vanilla.llama.tokenize(prompt.encode()) for prompt in PROMPTS[: n_prompts()]]
    requests = [(prompt, vanilla.reply(prompt)) for prompt in prompts]
    history = [np.array([*prompt, *said]) for prompt, said in requests]
    for talk in history:
        replaced = rng.random(len(talk)) < REPLACED
        talk[replaced] = rng.integers(300, 4000, replaced.sum())
    with drafting(path, kind, history, penalty=PENALTY) as ours:
        compare_speakers(benchmark, vanilla, ours, requests)
    vanilla.llama.close()


@pytest.mark.parametrize("kind", ["datastore", "prompt_lookup"])
@pytest.mark.parametrize("user", ["turns-travel", "cloud-gpt-4"])
@pytest.mark.parametrize("model", ["reference_model", "model_1b"])
def bench_user(request, benchmark, model, user, kind):
    reference_model = request.getfixturevalue("reference_model")
    reference = Speaker(reference_model)
    history, prompts = conversations(reference.llama, user)
    requests, path = [(prompt,) for prompt in prompts], request.getfixturevalue(model)
    if path != reference_model:
        requests = [(prompt, reference.reply(prompt)) for prompt in prompts]
    reference.llama.close()
    vanilla = Speaker(path)
    with drafting(path, kind, history) as ours:
        compare_speakers(benchmark, vanilla, ours, requests)
    vanilla.llama.close()
    benchmark.extra_info["stored_tokens"] = sum(map(len, history))


def conversations(llama, user):
    """Return the tokens of a user's history, and prompts from the user's test conversations."""
    try:
        found = split(load(DATA, user), "0")
    except FileNotFoundError as error:
        pytest.skip(f"set LLMAAS_DATA to the folder of the chat sets: {error}")
    history = [np.array(llama.tokenize(chat.text.encode())) for chat in found.train]
    texts = [chat._replace(turns=chat.turns[:-1]).text + "Assistant:" for chat in found.test]
    prompts = [llama.tokenize(text.encode()) for text in texts]
    return history, [p for p in prompts if len(p) <= N_PROMPT_MAX][: n_prompts()]


def n_prompts():
    return min(N_PROMPTS, repeats(N_PROMPTS))


def bench_call(benchmark):
    """Measure one draft call with 400,000 stored tokens, compared with 20 ms for a token."""
    rng = np.random.default_rng(0)
    phrases = rng.integers(0, 32_000, (2000, 8))
    order = np.minimum(rng.zipf(1.3, (N_STORED // N_TALK, N_TALK // 8)), len(phrases)) - 1
    talks = [np.concatenate(phrases[row]).astype(np.intc) for row in order]
    started = time.perf_counter()
    draft = DatastoreDraft(talks)
    build_s = time.perf_counter() - started
    context, seconds = np.concatenate(talks[:10]), []

    def calls():
        for n in range(2000, 4000, 4):
            started = time.thread_time()
            draft(context[:n])
            seconds.append(time.thread_time() - started)

    benchmark.pedantic(calls, rounds=repeats(5))
    benchmark.extra_info.update(
        call_us=quartiles(1e6 * np.array(seconds)),
        percent_of_a_token=100 * float(np.mean(seconds)) / 0.020,
        build_s=build_s,
        bytes_per_token=draft.n_bytes / N_STORED,
    )
