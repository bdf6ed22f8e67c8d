"""Changes that the codecs make to the reference model's predictions on real conversations."""

from __future__ import annotations

import contextlib

import pytest

from llmaas_eval.quality import conversation_texts, drift, read
from llmaas_plugins import activate
from llmaas_plugins.reference_model import reference_model_path

N_TEXT, N_LAST = 400, 150
SETTINGS = {"n_ctx": 1024, "flash_attn": True, "verbose": False}


@pytest.mark.parametrize("n_swaps", [1, 4])
@pytest.mark.parametrize("codec", ["tolerance", "int8", "lossless"])
def bench_drift(benchmark, tmp_path, codec, n_swaps):
    """Measure the drift of each text after ``n_swaps`` swaps out and in before its last tokens.

    The vanilla context is never swapped. A restored context evaluates its prompt's last token
    alone; vanilla evaluates the whole prompt in one batch. The lossless codec's figures show the
    effect of that rounding alone.
    """
    from llama_cpp import Llama

    with contextlib.closing(Llama(str(reference_model_path()), **SETTINGS)) as llama:
        texts = conversation_texts(llama, N_TEXT)
        vanilla = [read(llama, text, N_LAST, 0) for text in texts]
    table = {"codec": codec, "store": str(tmp_path / "kv")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(activate({"on_error": "raise", "plugins": {"kv_chunks": table}}))
        llama = Llama(str(reference_model_path()), **SETTINGS)
        stack.callback(llama.close)
        ours = benchmark.pedantic(
            lambda: [read(llama, text, N_LAST, n_swaps) for text in texts], rounds=1
        )
    found = drift(texts, vanilla, ours)
    benchmark.extra_info.update(found._asdict(), n_positions=N_LAST * len(texts))
