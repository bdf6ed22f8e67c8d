"""Cost of the engine's hook point, compared with vanilla's default build on one loaded model.

Both contexts share the model's weights and take turns batch by batch.
"""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest

from llmaas_eval.batches import batches, loaded
from llmaas_eval.nodes import NodeTimer
from llmaas_eval.paired import compare, repeats
from llmaas_eval.stats import median_interval
from llmaas_hooks import WeightClaim, hookimpl
from llmaas_plugins import activate

ROUNDS = 30
# Timed nodes, each with the node just before it.
NODES = {
    "ffn_up": "ffn_gate",
    "ffn_gate": "ffn_norm",
    "ffn_out": "ffn_swiglu",
    "attn_out": "kqv_out",
    "ffn_inp": "attn_out",  # adds two rows: its time is almost only the cost of the stops
}
PARTS = {
    "all": ("ffn_gate", "ffn_up", "ffn_out", "attn_out"),
    "rows": ("ffn_gate", "ffn_up"),
    "columns": ("ffn_out", "attn_out"),
    "columns of ffn_down": ("ffn_out",),
    "columns of attn_output": ("attn_out",),
}
RATIOS = (0.25, 0.5, 0.75)


class Native:
    """Plugin that claims weights and keeps the native context."""

    def __init__(self, claims=()):
        self.claims = list(claims)
        self.context = None

    @hookimpl
    def llmaas_weights(self):
        return self.claims

    @hookimpl
    def llmaas_native_context(self, context):
        self.context = context


@pytest.fixture(params=["200m", "1b"])
def pair(request):
    """Open a vanilla context and a native one on the same model."""
    plugin = Native()
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(loaded(request.getfixturevalue(f"model_{request.param}")))
        vanilla = stack.enter_context(batches(model))
        stack.enter_context(activate({"on_error": "raise"}, {"bench": plugin}))
        native = stack.enter_context(batches(model))
        yield vanilla, native, plugin.context


def step(batches, what, n_prompt=512):
    return functools.partial(batches.prefill, n_prompt) if what == "prefill" else batches.generate


def clear_both(vanilla, native):
    def clear():
        vanilla.clear()
        native.clear()

    return clear


@pytest.mark.parametrize("what", ["prefill", "generate"])
def bench_pass_through(pair, benchmark, what):
    """Compare 512 tokens at once, or 8 one by one, with no weight claimed and no tap open."""
    vanilla, native, _ = pair
    clear = clear_both(vanilla, native)
    compare(benchmark, step(native, what), step(vanilla, what), before=clear, rounds=ROUNDS)


@pytest.mark.parametrize(
    ("what", "states"),
    [("prefill", "ffn_input"), ("generate", "ffn_input"), ("generate", "final_norm")],
)
def bench_hidden_states(pair, benchmark, what, states):
    """Compare a context that captures the hidden states of all outputs with itself without capture.

    Two contexts differ in speed by 1 to 2 % because of their memory layout, and capturing costs
    less than that; so both sides use the same context.
    """
    _, native, context = pair
    run = step(native, what)
    capture = contextlib.ExitStack()

    def captured():
        capture.enter_context(context.hidden_states(states))
        run()

    def before():
        capture.close()
        native.clear()

    compare(benchmark, captured, run, before=before, rounds=ROUNDS)


@pytest.mark.parametrize("source", [None, "tiles"], ids=["in-place", "tiles"])
@pytest.mark.parametrize("what", ["prefill", "generate"])
@pytest.mark.parametrize("weights", ["q4_0", "q4_k"])
def bench_parts(request, benchmark, weights, what, source):
    """Measure products with row prefixes of gate and up, and column prefixes of down and output.

    The products run inside the model, for 128 tokens at once or 8 one by one. Figures are their
    times as shares of vanilla's, by part and ratio, without the cost of the timer's stops.
    """
    plugin, timer = Native(claims(source)), NodeTimer(NODES)
    path = request.getfixturevalue("model_1b" if weights == "q4_0" else "model_1b_q4_k")
    with contextlib.ExitStack() as stack:
        vanilla_model = stack.enter_context(loaded(path))
        vanilla = stack.enter_context(batches(vanilla_model, timer.attach))
        stack.enter_context(activate({"on_error": "raise"}, {"bench": plugin}))
        native = stack.enter_context(batches(stack.enter_context(loaded(path)), timer.attach))

        def taken(context):
            context.clear()
            timer.reset()
            step(context, what, n_prompt=128)()
            return dict(timer.seconds)

        def at(level):
            plugin.context.level = level
            return taken(native)

        def one_round():
            rounds.append([taken(vanilla), *(at(level) for level in range(len(RATIOS) + 1))])

        rounds = []
        one_round()
        rounds.clear()
        benchmark.pedantic(one_round, rounds=repeats(ROUNDS))
    benchmark.extra_info.update(shares(rounds))


def claims(source):
    """Return claims for the 1 B shape, with a level for all of each weight and one per ratio.

    The model's width is 2,048, its feed-forward width 8,192. Level 0 is all of each weight.
    """
    wide, narrow = ([round(n * ratio) for ratio in RATIOS] for n in (8192, 2048))
    return [
        WeightClaim(r"blk\.\d+\.ffn_(gate|up)\.weight", source, rows=(None, *wide)),
        WeightClaim(r"blk\.\d+\.ffn_down\.weight", source, columns=(None, *wide)),
        WeightClaim(r"blk\.\d+\.attn_output\.weight", source, columns=(None, *narrow)),
    ]


def shares(rounds):
    """Return each level's time over vanilla's in the same round: median and 95 % interval."""
    figures = {}
    for part, nodes in PARTS.items():
        seconds = np.array([[net(one, nodes) for one in each] for each in rounds])
        vanilla = seconds[:, 0]
        figures[f"{part} vanilla ms"] = 1e3 * float(np.median(vanilla))
        for level, ratio in enumerate((1, *RATIOS), start=1):
            median, low, high = median_interval(seconds[:, level] / vanilla)
            figures[f"{part} {ratio}"] = f"{median:.3f} ({low:.3f}–{high:.3f})"
    return figures


def net(seconds, nodes):
    """Return the seconds of ``nodes`` without the cost of their stops."""
    return sum(seconds[node] - seconds["ffn_inp"] for node in nodes)
