"""``python -m llmaas_eval.deadlines.certificate``: how often certificates of a risk hold.

Each kind of text is an app. Its prompts are split at random, many times: half of them certify a
risk as ``llmaas deadlines learn`` does, and the other half shows the real one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from llmaas_eval.data import DATA, documents_by_kind
from llmaas_eval.deadlines.certificate_report import report
from llmaas_eval.results import write
from llmaas_hooks import Tokens
from llmaas_plugins import elastic
from llmaas_plugins.activation import activate
from llmaas_plugins.cli.given_text import tokens_of
from llmaas_plugins.deadlines.answering import Comparison, Prompts
from llmaas_plugins.deadlines.answers import Answers
from llmaas_plugins.deadlines.learning import cut_prompts, measured
from llmaas_plugins.deadlines.policies import Policy, certified
from llmaas_plugins.elastic.checkpoint import Checkpoint, fingerprint_of
from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.model.loading import loaded

__all__ = ["Setting", "Split", "main", "splits"]

_LENGTHS = (24, 48)
"""Tokens of a prompt."""
_N_CHARACTERS = 600_000


class Setting(NamedTuple):
    """Risks to certify.

    Attributes:
        n_requests: Requests of each app.
        n_splits: Random splits of them.
        answers: Numbers of an answer's tokens that must not differ.
        max_risk: Largest probability of another answer.
        confidence: Probability that a certificate holds.
    """

    n_requests: int
    n_splits: int = 200
    answers: Sequence[int] = (1, 2, 4)
    max_risk: float = 0.1
    confidence: float = 0.95


class Split(NamedTuple):
    """One split of an app's requests.

    Attributes:
        app: Name of the app.
        n_tokens: Tokens of an answer that must not differ.
        n_certified: Number of requests that certified the risk.
        n_policies: Number of policies that were certified, without the whole model.
        level: Mean level of the narrowest one, over prompts and answers.
        risk: Its measured risk on the other requests.
        worst: Highest measured risk of all certified ones.
    """

    app: str
    n_tokens: int
    n_certified: int
    n_policies: int
    level: float
    risk: float
    worst: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the output; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m llmaas_eval.deadlines.certificate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, help="prepared model")
    add("--data", type=Path, default=DATA, help="folder of the data sets; %(default)s")
    add("--requests", type=int, default=1200, help="requests of each app; %(default)s")
    add("-o", "--output", type=Path, default=Path("deadlines"), help="folder for the results")
    args = parser.parse_args(argv)
    setting = Setting(args.requests)
    found = _measured(args.model, _documents(args.data), setting, args.output)
    rows = [split._asdict() for app in found for split in splits(app, found, setting)]
    text = write(args.output / "certificate.json", setting._asdict(), rows, report)
    sys.stdout.write(f"{text}\n")
    return 0


def splits(app: str, found: Mapping[str, Answers], setting: Setting) -> Iterator[Split]:
    """Certify an app's risk on random halves of its requests, and measure it on the others.

    Risks by margin are estimated on the other apps' requests, as general text.
    """
    answers, fitting = found[app], _together([one for name, one in found.items() if name != app])
    chance, n = np.random.default_rng(0), len(answers)
    for n_tokens in setting.answers:
        for _ in range(setting.n_splits):
            rows = chance.permutation(n)
            calibration, test = answers.some(rows[: n // 2]), answers.some(rows[n // 2 :])
            policies = certified(
                fitting, calibration, n_tokens, setting.max_risk, 1 - setting.confidence
            )
            served = min(policies, key=lambda policy: _level(policy, n_tokens))
            risks = [_risk(policy, test, n_tokens) for policy in policies]
            yield Split(
                app,
                n_tokens,
                len(calibration),
                len(policies) - 1,
                _level(served, n_tokens),
                _risk(served, test, n_tokens),
                max(risks),
            )


# -- inside --------------------------------------------------------------------------------------


def _documents(data: Path) -> Mapping[str, str]:
    return {
        kind: "\n\n".join(documents)[:_N_CHARACTERS]
        for kind, documents in documents_by_kind(data).items()
    }


def _measured(
    path: Path, texts: Mapping[str, str], setting: Setting, folder: Path
) -> dict[str, Answers]:
    """Measure each app's answers; what an earlier run measured is not repeated."""
    prepared = read_elastic(path)
    if prepared is None:
        raise SystemExit(f"{path} is not prepared: `llmaas elastic prepare` writes a file that is")
    digest, found = file_digest(path), dict[str, Answers]()
    comparison = Comparison(max(setting.answers), prepared.levels, elastic.level)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        activate({"on_error": "raise", "plugins": {"elastic": {}}}),
        loaded(path) as opened,
        tqdm(total=len(texts) * setting.n_requests, desc="requests") as bar,
    ):
        for number, (app, text) in enumerate(texts.items()):
            prompts = _prompts(tokens_of(text.encode(), opened), setting.n_requests)
            about = {
                "model": digest,
                "app": app,
                "answer": comparison.n_answer,
                "prompts": _id(prompts),
            }
            kept = Checkpoint(folder / f"certificate-{number}.npz", fingerprint_of(about))
            try:
                found[app] = measured(opened.model, Prompts(prompts), comparison, kept, bar.update)
            finally:
                kept.save()
    return found


def _together(some: Sequence[Answers]) -> Answers:
    """Return the answers of several apps together."""
    return Answers(
        some[0].levels,
        some[0].n_answer,
        np.concatenate([one.n_prompt for one in some]),
        np.concatenate([one.leads for one in some]),
        np.concatenate([one.margins for one in some]),
    )


def _prompts(text: Tokens, n: int) -> list[Tokens]:
    return cut_prompts([text], n, lengths=_LENGTHS)


def _id(prompts: Sequence[Tokens]) -> str:
    return fingerprint_of({"tokens": [prompt.tolist() for prompt in prompts]})


def _level(policy: Policy, n_tokens: int) -> float:
    """Return the mean of the prompt's level and the answer's mean level.

    The first token is the prompt's, so an answer of one token has no level of its own.
    """
    decode = policy.prefill if n_tokens == 1 else float(np.dot(policy.decode, policy.shares))
    return (policy.prefill + decode) / 2


def _risk(policy: Policy, answers: Answers, n_tokens: int) -> float:
    """Return the share of answers that differ from the whole model's."""
    prefill = answers.levels.index(policy.prefill)
    ranges = np.searchsorted(policy.edges, answers.margins[:, prefill])
    decode = np.array([answers.levels.index(level) for level in policy.decode])[ranges]
    differ = answers.differ(n_tokens)
    return float(differ[np.arange(len(answers)), prefill, decode].mean())


if __name__ == "__main__":
    sys.exit(main())
