"""Get the tokens that a ``Llama``'s own chat handler makes of messages; nothing is evaluated."""

from __future__ import annotations

from typing import Any, cast

from llama_cpp import Llama, llama_cpp

from llmaas_plugins.chats.text_limit import check_text

__all__ = ["conversation_tokens", "prompt_tokens"]

Messages = list[dict[str, str]]


def prompt_tokens(
    llama: Any, messages: Messages, options: dict[str, Any], *, is_limited: bool = False
) -> list[int] | None:
    """Return the prompt that ``llama`` would make of ``messages``.

    Args:
        llama: A ``llama_cpp.Llama``.
        messages: OpenAI-style messages, in order.
        options: Options of ``Llama.create_chat_completion``.
        is_limited: Whether to refuse a text that does not fit into the engine.

    Returns:
        The prompt, or None if the chat handler makes no list of tokens but uses the engine itself.

    Raises:
        TextTooLongError: A limited text is too long.
    """
    listener: Any = _Listener(llama, is_limited=is_limited)
    try:
        Llama.create_chat_completion(listener, messages=cast("Any", messages), **options)
    except _Heard as heard:
        return heard.prompt
    except AttributeError:
        return None
    return None


def conversation_tokens(llama: Any, messages: Messages) -> list[int] | None:
    """Return the tokens of a conversation, as the engine has them when the conversation goes on.

    A prompt ends by opening the assistant's next turn. That opening is left out, because nothing
    was said in that turn yet. The token that ends the last turn stays.

    Returns:
        The tokens, or None as ``prompt_tokens``.
    """
    tokens = prompt_tokens(llama, messages, {})
    if tokens is None or messages[-1]["role"] != "assistant":
        return tokens
    opening = _opening(llama)
    return tokens[: len(tokens) - opening] if opening else tokens


def _opening(llama: Any) -> int:
    """Count the tokens between the end of a turn and the assistant's next word.

    Two prompts that differ only in their last word share these tokens and the end of the turn. The
    end of the turn is the first token that ends a generation, or, without such a token, one token.
    """
    ends = [prompt_tokens(llama, [_ASKED, _said(word)], {}) for word in ("x", "y")]
    if ends[0] is None or ends[1] is None or ends[0] == ends[1]:
        return 0
    alike = 0
    for one, other in zip(reversed(ends[0]), reversed(ends[1]), strict=False):
        if one != other:
            break
        alike += 1
    vocab = llama_cpp.llama_model_get_vocab(llama.model)
    after = range(len(ends[0]) - alike, len(ends[0]))
    last = (i for i in after if llama_cpp.llama_vocab_is_eog(vocab, ends[0][i]))
    return len(ends[0]) - 1 - next(last, after.start) if alike else 0


_ASKED = {"role": "user", "content": "x"}


def _said(word: str) -> dict[str, str]:
    return {"role": "assistant", "content": word}


class _Heard(Exception):  # noqa: N818  no error
    """Signal that a chat handler has requested a completion."""

    def __init__(self, prompt: object) -> None:
        self.prompt = prompt if isinstance(prompt, list) else None


class _Listener:
    """The attributes of a ``Llama`` that chat handlers need to make a prompt."""

    def __init__(self, llama: Any, *, is_limited: bool) -> None:
        # the format, the handler, and the handlers made from the model's metadata
        vars(self).update({name: value for name, value in vars(llama).items() if "chat" in name})
        self.verbose = llama.verbose
        self._llama, self._is_limited = llama, is_limited

    def tokenize(self, text: bytes, *args: Any, **kwargs: Any) -> list[int]:
        if self._is_limited:
            check_text(self._llama, text)
        return Llama.tokenize(self._llama, text, *args, **kwargs)  # even if the engine has a limit

    def create_completion(self, prompt: object, **_: Any) -> Any:
        raise _Heard(prompt)
