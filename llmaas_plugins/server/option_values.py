"""Values of llama_cpp.server's options that it takes although they fail later or have no effect."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp

from llmaas_hooks import ConfigError
from llmaas_plugins.model.gguf_header import read_header

__all__ = ["IMAGE_FORMATS", "check_values"]

_CELLS = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    20: "iq4_nl",
    30: "bf16",
    39: "mxfp4",
}
"""Types of ``ggml`` that cells of a context can have; with others, ggml ends the process."""

_CHOICES: dict[str, tuple[object, ...]] = {
    "draft_model": ("prompt-lookup-decoding",),
    "split_mode": tuple(range(llama_cpp.LLAMA_SPLIT_MODE_TENSOR + 1)),
    "rope_scaling_type": tuple(range(-1, llama_cpp.LLAMA_ROPE_SCALING_TYPE_MAX_VALUE + 1)),
}
"""Options for which llama_cpp takes any value, and then uses another one."""

_MOST_THREADS = 512
"""Most threads of a computation, ``GGML_MAX_N_THREADS``. The OpenMP library ends the process if the
system refuses so many.
"""
_RANGES = {
    "n_threads": range(1, _MOST_THREADS + 1),
    "n_threads_batch": range(_MOST_THREADS + 1),
    "last_n_tokens_size": range((1 << 20) + 1),
    "draft_model_num_pred_tokens": range(1 << 31),
}
"""Integers that work. Each request allocates and clears ``last_n_tokens_size`` numbers."""

_NOT_NEGATIVE = ("rope_freq_base", "rope_freq_scale", "yarn_orig_ctx")
"""Numbers with which, if they were negative, llama.cpp would compute no probabilities (NaN)."""

_OVERRIDE = re.compile(
    r"[^=]{1,127}=(bool:(true|false|1|0)|int:[+-]?\d{1,18}|float:[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
    r"|str:[^=:]{0,127})",
    re.ASCII | re.IGNORECASE,
)
"""Entries of a model's file with other values; llama_cpp ignores one without a type."""

_KINDS = ("bool", "int", "float", "str")

IMAGE_FORMATS = (
    "llava-1-5",
    "llava-1-6",
    "obsidian",
    "mtmd",
    "gemma4",
    "moondream",
    "nanollava",
    "llama-3-vision-alpha",
    "minicpm-v-2.6",
    "qwen2.5-vl",
)
"""Chat formats that need ``--clip_model_path``."""

_SET_BY_LLAMA_CPP = (
    "messages",
    "functions",
    "function_call",
    "tools",
    "tool_choice",
    "eos_token",
    "bos_token",
    "add_generation_prompt",
    "raise_exception",
    "strftime_now",
)
"""Arguments of chat templates that ``--chat_template_kwargs`` cannot set, or every chat fails."""


def check_values(model: Any) -> None:
    """Check the values of a model's options.

    Raises:
        ConfigError: With a value, no request would succeed, or the value would have no effect.
    """
    problem = next(chain(_unknown(model), _failing(model), _without_effect(model)), None)
    if problem is not None:
        raise ConfigError(problem)


def _unknown(model: Any) -> Iterator[str]:
    for name in ("type_k", "type_v"):
        if (found := getattr(model, name)) is not None and found not in _CELLS:
            known = ", ".join(f"{number} ({kind})" for number, kind in _CELLS.items())
            yield f"--{name}: contexts have no cells of type {found}. Known: {known}."
    for name, choices in _CHOICES.items():
        if (found := getattr(model, name)) is not None and found not in choices:
            known = ", ".join(map(str, choices))
            yield f"--{name}: unknown value {found!r}. Known: {known}."
    for name, fitting in _RANGES.items():
        if (found := getattr(model, name)) not in fitting:
            yield f"--{name} must be from {fitting[0]} to {fitting[-1]}, found {found}"
    for text in model.kv_overrides or ():
        if not _OVERRIDE.fullmatch(text):
            yield (
                f"--kv_overrides: expected KEY=TYPE:VALUE with bool, int, float or str as TYPE, "
                f"found {text!r}"
            )


def _failing(model: Any) -> Iterator[str]:
    for name in _NOT_NEGATIVE:
        if (found := getattr(model, name)) < 0:
            yield f"--{name} must be at least 0, found {found:g}: no token could be computed."
    if model.vocab_only:
        yield "--vocab_only loads no weights, so that no call could be answered. Leave it out."
    name = "hf_pretrained_model_name_or_path"
    if getattr(model, name) is not None and importlib.util.find_spec("transformers") is None:
        yield f"--{name} needs transformers. Try `pip install transformers`, or leave it out."
    if taken := [key for key in _SET_BY_LLAMA_CPP if key in (model.chat_template_kwargs or ())]:
        yield (
            f"--chat_template_kwargs cannot set {', '.join(taken)}, which llama_cpp itself gives "
            "to chat templates. Leave it out."
        )


def _without_effect(model: Any) -> Iterator[str]:
    if model.kv_overrides and model.hf_model_repo_id is None:
        yield from _other_types(model)
    if model.lora_base is not None:
        yield "--lora_base has no effect: adapters are added to the model itself. Leave it out."
    if model.clip_model_path is not None and model.chat_format not in IMAGE_FORMATS:
        formats = ", ".join(IMAGE_FORMATS)
        yield (
            "--clip_model_path has no effect without --chat_format of a model that sees images. "
            f"Choose from: {formats}; or leave it out."
        )
    if model.hf_tokenizer_config_path is not None and model.chat_format != "hf-tokenizer-config":
        yield (
            "--hf_tokenizer_config_path has no effect without --chat_format hf-tokenizer-config. "
            "Give it, too, or leave the option out."
        )
    if model.rpc_servers is not None and not llama_cpp.llama_supports_rpc():
        yield (
            "--rpc_servers has no effect: this llama-cpp-python was built without RPC. Build it "
            "with CMAKE_ARGS=-DGGML_RPC=on, or leave it out."
        )


def _other_types(model: Any) -> Iterator[str]:
    """Yield problems with overrides of another type than the file's entry has."""
    fields = read_header(Path(model.model)).fields
    for text in model.kv_overrides:
        key, _, typed = text.partition("=")
        kind = typed.partition(":")[0].lower()
        has = type(fields[key]).__name__ if key in fields else kind
        has = has if has in _KINDS else "list"
        if has != kind:
            yield (
                f"--kv_overrides {text} has no effect: the file's {key} has the type {has}. "
                "Give a value of this type, or leave it out."
            )
