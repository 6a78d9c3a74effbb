"""Prompts in all their forms: texts, chat messages, token ids, and what a processor makes of pictures and
recordings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import ProcessorMixin

from ...model.peft_parts import base_of

RAW = ("images", "videos", "audio")
"""A processor's inputs in addition to a text."""
SAID = ("text", "refusal")
"""Parts of chat messages that are words."""


OnePrompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or the messages of a chat."""


class Conversation(NamedTuple):
    """Chat messages, and keywords of their template beside them: tools, documents, others of its own."""

    messages: Sequence[Mapping[str, Any]]
    template: Mapping[str, Any] = MappingProxyType({})


class Prompts(NamedTuple):
    """The prompts of a call. single: true if it was given one instead of a list."""

    prompts: list[Any]
    single: bool

    @classmethod
    def of(cls, given: Any) -> Prompts:
        """A text, the messages of a chat and the token ids of one sequence are one prompt."""
        if isinstance(given, (str, Conversation)) or is_chat(given):
            return cls([given], True)
        if isinstance(given, (bytes, Mapping)) or not isinstance(given, Iterable):
            raise TypeError(
                f"generate() takes a prompt or a list of prompts, got {short(given)}; a prompt is a text, "
                "chat messages or token ids"
            )
        array: Any = given
        found = array.tolist() if getattr(array, "ndim", None) == 1 else list(array)
        return cls([found], True) if found and _ids_of(found) is not None else cls(found, False)


def conversations(messages: Any, template: Mapping[str, Any]) -> Any:
    """The messages of a chat as a prompt, or those of several as a list of prompts. template: keywords of the
    chat template; None leaves one out.
    """
    given = {name: value for name, value in template.items() if value is not None}
    listed = isinstance(messages, Iterable) and not isinstance(messages, (str, bytes, Mapping))
    several = list(messages) if listed else []
    if is_chat(several):
        return Conversation(several, given)
    if not several or not all(map(is_chat, several)):
        raise TypeError(
            f"chat() takes messages like [{{'role': 'user', 'content': 'Hello'}}], or a list of such lists, "
            f"got {short(messages)}"
        )
    return [Conversation(each, given) for each in several]


class TokenizedPrompt(NamedTuple):
    """A prompt, perhaps token ids by now, and what is shown in it, by the names of a forward's arguments."""

    prompt: Any
    shown: dict[str, Any]


def words_of(tokenizer: Any) -> Any:
    """The tokenizer that makes texts: of a processor its own."""
    return getattr(tokenizer, "tokenizer", tokenizer) if isinstance(tokenizer, ProcessorMixin) else tokenizer


def tokenize_prompt(model: Any, tokenizer: Any, prompt: Any, keywords: dict[str, Any]) -> TokenizedPrompt:
    """A prompt whose ids may be among the keywords, as a processor answers, or are the processor's to
    make.
    """
    ids = keywords.pop("input_ids", None)
    if ids is not None:
        if prompt is not None:
            raise ValueError("the prompt and input_ids are both token ids; give one of them")
        prompt = ids
        mask = keywords.pop("attention_mask", None)
        if mask is not None and not bool(torch.as_tensor(mask, device="cpu").all()):
            raise ValueError(
                "the attention_mask hides some of the prompt; give one prompt a request, without padding"
            )
    raw = {name: keywords.pop(name) for name in RAW if keywords.get(name) is not None}
    text = isinstance(prompt, str)
    chat = _conversation(prompt)
    if not isinstance(tokenizer, ProcessorMixin):
        if raw or (chat and _shows(chat.messages)):
            what = sorted(raw) or "messages with images or audio"
            raise ValueError(
                f"{what} are for the model's processor; make the engine with it, Engine(model, processor)"
            )
        return TokenizedPrompt(prompt, {})
    if raw and not text:
        raise ValueError(
            f"{sorted(raw)} belong to a text prompt, got {short(prompt)}; put those of chat "
            "messages into them"
        )
    if chat is None and not text:
        return TokenizedPrompt(prompt, {})
    if chat is None:
        made = tokenizer(text=[prompt], **raw, return_tensors="pt")
    else:
        made = _rendered(tokenizer, chat, return_tensors="pt")
    shown = {
        name: _as_computed(model, value)
        for name, value in made.items()
        if name not in ("input_ids", "attention_mask")
    }
    return TokenizedPrompt(made["input_ids"], shown if raw or (chat and _shows(chat.messages)) else {})


def prompt_tokens(prompt: Any, tokenizer: Any) -> tuple[int, ...]:
    """The token ids of a text, of chat messages, or of ids in a list or tensor."""
    chat = _conversation(prompt)
    if isinstance(prompt, str) or chat is not None:
        if tokenizer is None:
            what = "a text" if chat is None else "chat messages"
            raise ValueError(
                f"the prompt is {what} and needs a tokenizer; give one to Engine(model, tokenizer), or pass "
                "token ids"
            )
        made = tokenizer(prompt) if chat is None else _rendered(tokenizer, chat)
        ids = made["input_ids"]
    elif hasattr(prompt, "tolist"):  # a tensor, or numpy's array
        ids = prompt.tolist()
    else:
        ids = prompt
    if isinstance(ids, Sequence) and len(ids) == 1 and isinstance(ids[0], Sequence):
        ids = ids[0]
    found = _ids_of(ids)
    if found is None:
        hint = '; give its "input_ids"' if isinstance(prompt, Mapping) and "input_ids" in prompt else ""
        several = isinstance(ids, Sequence) and not isinstance(prompt, Mapping)
        hint = "; engine.generate() takes a list of prompts" if several else hint
        raise TypeError(
            f"a prompt is a text, chat messages or the token ids of one sequence, got {short(prompt)}{hint}"
        )
    if not found:
        raise ValueError("the prompt is empty; give it at least one token")
    return found


def known_ids(module: Any) -> int | None:
    """For how many token ids, from 0 on, a module has embeddings; None if it does not say."""
    try:
        table = base_of(module.get_input_embeddings())  # peft's module makes a weight for each look
    except (AttributeError, NotImplementedError):
        return None
    own = getattr(table, "num_embeddings", None)
    return own or getattr(getattr(table, "weight", None), "shape", (None,))[0]


def checked_ids(tokens: tuple[int, ...], module: Any, vocabulary: int | None = None) -> tuple[int, ...]:
    """Token ids that the module has embeddings for: on a CUDA device any other would be the end of the
    process's device. vocabulary: how many ids the adapters of a request know, if they are not the module's.
    """
    rows = vocabulary or known_ids(module)
    if rows is not None and tokens and not 0 <= min(tokens) <= max(tokens) < rows:
        wrong = next(token for token in tokens if not 0 <= token < rows)
        raise ValueError(
            f"the prompt has the token id {wrong} and "
            f"{type(module).__name__ if vocabulary is None else 'its adapter'} knows those from 0 to "
            f"{rows - 1}; use the tokenizer of this {'model' if vocabulary is None else 'adapter'}"
        )
    return tokens


def short(value: object) -> str:
    """A value for an error message."""
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"


def _rendered(tokenizer: Any, chat: Conversation, **options: Any) -> Any:
    """Messages as a chat template renders them."""
    options |= {"add_generation_prompt": True, **chat.template}
    try:
        return tokenizer.apply_chat_template(list(chat.messages), tokenize=True, return_dict=True, **options)
    except ValueError:
        raise
    except Exception as error:  # the template's, which names no message
        raise ValueError(
            f"the chat template cannot render {short(chat.messages)} ({error}); messages are like "
            "{'role': 'user', 'content': 'Hello'}"
        ) from error


def _conversation(prompt: Any) -> Conversation | None:
    """A prompt of chat messages; None if it is something else."""
    if isinstance(prompt, Conversation):
        return prompt
    return Conversation(prompt) if is_chat(prompt) else None


def is_chat(prompt: Any) -> bool:
    """True for the messages of a chat."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


def _shows(messages: Any) -> bool:
    """True if anything in chat messages is more than words."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [
        part
        for content in contents
        if isinstance(content, (list, tuple))
        for part in content
        if isinstance(part, Mapping)
    ]
    return any(part.get("type", "text") not in SAID for part in parts)


def _ids_of(ids: object) -> tuple[int, ...] | None:
    """Whole numbers as token ids, Python's or numpy's; None if they are something else."""
    if not isinstance(ids, Sequence) or isinstance(ids, bytes):
        return None
    kinds = set(map(type, ids))
    if kinds <= {int}:
        return tuple(ids)
    return (
        tuple(map(int, ids))
        if all(issubclass(kind, Integral) and not issubclass(kind, bool) for kind in kinds)
        else None
    )


def _as_computed(model: Any, value: Any) -> Any:
    """The output of a processor, in the model's dtype, as callers of generate() convert it."""
    return value.to(model.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
