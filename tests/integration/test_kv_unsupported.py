"""Models whose cells cannot be stored in chunks: named in the status, and exactly vanilla."""

from __future__ import annotations

import contextlib

import gguf
import numpy as np
import pytest
from llama_cpp import Llama

from llmaas_plugins import activate

N_VOCAB, N_EMBD, N_HEAD, N_FF = 64, 64, 2, 64
PROMPTS = [[1, *range(5, 45)], [1, *range(30, 50)], [1, *range(5, 50)]]


def attention(*extra):
    square, norm = (N_EMBD, N_EMBD), (N_EMBD,)
    names = ("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight")
    shapes = dict.fromkeys(names, square) | {"attn_norm.weight": norm}
    shapes |= dict.fromkeys(("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"), square)
    return shapes | dict.fromkeys(extra, norm)


SSM = {
    "attn_norm.weight": (N_EMBD,),
    "ssm_in.weight": (4 * N_EMBD, N_EMBD),
    "ssm_conv1d.weight": (2 * N_EMBD, 4),
    "ssm_conv1d.bias": (2 * N_EMBD,),
    "ssm_x.weight": (4 + 2 * 16, 2 * N_EMBD),
    "ssm_dt.weight": (2 * N_EMBD, 4),
    "ssm_dt.bias": (2 * N_EMBD,),
    "ssm_a": (2 * N_EMBD, 16),
    "ssm_d": (2 * N_EMBD,),
    "ssm_out.weight": (N_EMBD, 2 * N_EMBD),
}
MODELS = {
    "cohere2": ("sliding window of 16 tokens: old cells are gone", attention()),
    "mamba": ("recurrent model: its state cannot drop ranges", SSM),
    "qwen2vl": (
        "2-D positions (M-RoPE)",
        attention("attn_q.bias", "attn_k.bias", "attn_v.bias", "ffn_norm.weight"),
    ),
}


def write_model(path, arch, shapes):
    """A model of four layers, all of random weights."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string("tokenizer.ggml.model", "none")
    writer.add_vocab_size(N_VOCAB)
    writer.add_context_length(256)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(4)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD)
    writer.add_layer_norm_eps(1e-5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_sliding_window(16)
    writer.add_logit_scale(1.0)
    writer.add_rope_dimension_sections([4, 6, 6, 0])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(2 * N_EMBD)
    writer.add_ssm_state_size(16)
    writer.add_ssm_time_step_rank(4)
    rng = np.random.default_rng(5)
    tensors = {"token_embd.weight": (N_VOCAB, N_EMBD), "output_norm.weight": (N_EMBD,)}
    tensors |= {f"blk.{i}.{name}": shape for i in range(4) for name, shape in shapes.items()}
    for name, shape in tensors.items():
        values = rng.normal(scale=0.3, size=shape).astype(np.float32)
        writer.add_tensor(name, -np.abs(values) if name.endswith("ssm_a") else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ask(llama, tokens):
    generator = llama.generate(tokens, temp=0.0)
    found = [next(generator) for _ in range(8)]
    generator.close()
    return found


@pytest.mark.parametrize("arch", MODELS)
def test_left_alone(arch, tmp_path):
    reason, shapes = MODELS[arch]
    path = write_model(tmp_path / "model.gguf", arch, shapes)

    def answers():
        settings = {"n_ctx": 256, "verbose": False, "n_threads": 1, "n_threads_batch": 1}
        with contextlib.closing(Llama(str(path), **settings)) as llama:
            return [ask(llama, prompt) for prompt in PROMPTS]

    expected = answers()
    config = {"on_error": "raise", "plugins": {"kv_chunks": {"store": str(tmp_path / "kv")}}}
    with activate(config) as suite:
        assert answers() == expected
        report = suite.status()["plugins"]["kv_chunks"]
    assert report["left_alone"] == [reason]
    assert report["restores"] == report["saves"] == 0
    assert not (tmp_path / "kv").exists()
