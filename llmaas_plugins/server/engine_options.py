"""llama_cpp.server's options: built from what was typed only, and checked before anything starts.

llama_cpp itself would ignore some mistakes in them until the first request, and then crash.
"""

from __future__ import annotations

import os
import re
import stat
from argparse import Namespace
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp
from llama_cpp.llama_chat_format import (
    LlamaChatCompletionHandlerNotFoundException,
    get_chat_completion_handler,
)
from llama_cpp.server.cli import parse_model_from_args
from llama_cpp.server.settings import ModelSettings, ServerSettings
from pydantic import ValidationError

from llmaas_hooks import ConfigError
from llmaas_hooks.discovery import suggest
from llmaas_plugins.files.file_bytes import OPEN_FLAGS
from llmaas_plugins.files.json_text import parse_json
from llmaas_plugins.model.cell_types import needs_flash_attention
from llmaas_plugins.model.gguf_header import read_header
from llmaas_plugins.server.option_values import IMAGE_FORMATS, check_values

__all__ = ["check_adapter", "check_model_options", "parse_settings"]

_NEEDS = {
    **dict.fromkeys(IMAGE_FORMATS, "clip_model_path"),
    "hf-autotokenizer": "hf_pretrained_model_name_or_path",
    "hf-tokenizer-config": "hf_tokenizer_config_path",
}
"""Chat formats that llama_cpp.server makes itself, with the option that each of them needs."""
_NEED_TOKENIZER = dict.fromkeys(
    ("functionary-v1", "functionary-v2"), "hf_pretrained_model_name_or_path"
)
"""Chat formats of llama_cpp that fail with each chat unless a tokenizer is loaded for them."""

_TEXTS = ("chat_template", "bos_token", "eos_token")
_FILES = ("lora_path", "hf_tokenizer_config_path", "clip_model_path")


class _OnlyTyped:
    """Settings without the environment: there, HOST or API_KEY are other programs' variables."""

    @classmethod
    def settings_customise_sources(
        cls, _settings: object, init_settings: Any, **_others: object
    ) -> tuple[Any, ...]:
        """Return the only source of values."""
        return (init_settings,)


class _Server(_OnlyTyped, ServerSettings):
    pass


class _Model(_OnlyTyped, ModelSettings):
    pass


def parse_settings(values: Namespace) -> tuple[Any, Any]:
    """Return the settings of server and model for options that were typed.

    Flash attention that was not asked for is used only where quantized values need it.

    Raises:
        ConfigError: A value is out of range.
    """
    if values.flash_attn is None:
        values.flash_attn = needs_flash_attention(values.type_v)
    try:
        return parse_model_from_args(_Server, values), parse_model_from_args(_Model, values)
    except ValidationError as error:
        found = (
            f"--{item['loc'][0]}: {item['msg']}, found {item['input']!r}" for item in error.errors()
        )
        raise ConfigError("; ".join(found)) from error


def check_model_options(model: Any) -> None:
    """Check what llama_cpp would notice at the first request only, or not survive.

    Raises:
        ConfigError: A file or a value cannot be used, or a chat format does not exist.
        StoreError: A file cannot be read.
    """
    for name in _FILES:
        path = getattr(model, name)
        is_in_hub = name == "clip_model_path" and model.hf_model_repo_id is not None
        if path is not None and not is_in_hub:
            _check_file(name, path)
    if model.lora_path is not None:
        _check_adapter_file(Path(model.lora_path))
    if model.hf_tokenizer_config_path is not None:
        _check_tokenizer_config(Path(model.hf_tokenizer_config_path))
    check_values(model)
    if model.chat_format is not None:
        _check_chat_format(model)


def check_adapter(llama: Any, path: str) -> None:
    """Check that an adapter fits a loaded model.

    llama_cpp does not notice that llama.cpp refused one, and crashes at the first request.

    Raises:
        ConfigError: It does not fit.
    """
    adapter = llama_cpp.llama_adapter_lora_init(llama.model, os.fsencode(path))
    if not adapter:
        raise ConfigError(
            f"--lora_path {path} does not fit the model, or is damaged. Use an adapter that was "
            "trained on this model; `llmaas -v serve` shows llama.cpp's reason."
        )
    llama_cpp.llama_adapter_lora_free(adapter)


def _check_file(name: str, path: str) -> None:
    then = "Correct the path, or leave the option out."
    try:
        fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
    except OSError as error:
        raise ConfigError(f"cannot read --{name} {path}: {error.strerror}. {then}") from error
    try:
        is_regular = stat.S_ISREG(os.fstat(fd).st_mode)
    finally:
        os.close(fd)
    if not is_regular:
        raise ConfigError(
            f"--{name} {path} is a folder or a device, expected a regular file. {then}"
        )


def _check_adapter_file(path: Path) -> None:
    fields = read_header(path).fields
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (found := str(fields.get(key, "nothing"))) != expected:
            raise ConfigError(
                f"--lora_path {path} is no adapter: expected {expected!r} as its {key}, found "
                f"{found!r}. Convert one with llama.cpp's convert_lora_to_gguf.py."
            )


def _check_tokenizer_config(path: Path) -> None:
    try:
        found = parse_json(path.read_bytes())
    except ValueError as error:
        raise ConfigError(
            f"--hf_tokenizer_config_path {path} is no JSON: {error}. Use a tokenizer_config.json."
        ) from error
    texts = found if isinstance(found, dict) else {}
    if lacking := [key for key in _TEXTS if not isinstance(texts.get(key), str)]:
        raise ConfigError(
            f"--hf_tokenizer_config_path {path}: expected the texts {', '.join(_TEXTS)}, found "
            f"no {' and no '.join(lacking)}. Use a tokenizer_config.json that has a chat template."
        )


def _check_chat_format(model: Any) -> None:
    name = model.chat_format
    if (needed := (_NEEDS | _NEED_TOKENIZER).get(name)) is not None:
        if getattr(model, needed) is None:
            raise ConfigError(f"--chat_format {name} needs --{needed}. Give it, too.")
        return
    if name.startswith("chat_template.") and _is_in_model(name, model):
        return
    try:
        get_chat_completion_handler(name)
    except LlamaChatCompletionHandlerNotFoundException as error:  # it lists all formats
        registered = re.findall(r"'([^']+)'", str(error).partition("(valid formats:")[2])
        known = sorted({*registered, *_NEEDS})
        raise ConfigError(
            f"--chat_format: there is no chat format {name!r}.{suggest(name, known)} Leave it out "
            f"for the model's own, or choose from: {', '.join(known)}."
        ) from error


def _is_in_model(name: str, model: Any) -> bool:
    """Return whether a model has this template; one from a hub is not there yet and may have it."""
    if model.hf_model_repo_id is not None:
        return True
    key = "tokenizer.chat_template" if name == "chat_template.default" else f"tokenizer.{name}"
    return key in read_header(Path(model.model)).fields
