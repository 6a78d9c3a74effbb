"""Prompts to token ids, beside the event loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from jinja2 import TemplateError

from ...engine.outputs.text import Detokeniser
from ..http.errors import invalid, too_large
from ..http.throttle import aside
from .images import ChatPrompt, Images
from .protocol import ChatFields, ImagePart, Message, TextPart
from .reply_parser import shown_tools
from .text import decode_of
from .token_bytes import bytes_of, text_of

T = TypeVar("T")
BLANK = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQAAAACCEkxzAAAAD0lEQVR4nGNgGAWjgHwAAAJAAAFZNqEDAAAAAElFTkSuQmCC"
)
"""A black image of 64 x 64 pixels."""
LONG = 2**16
"""Characters from which a text is a long one."""
RESERVED = frozenset(
    {
        "add_generation_prompt", "chat_template", "conversation", "continue_final_message", "documents",
        "max_length", "messages", "padding", "processor_kwargs", "return_assistant_tokens_mask",
        "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip
"""Arguments of apply_chat_template that a request may not set through chat_template_kwargs."""


class Tokenizer:
    """The served model's tokenizer. Threads of its own make ids of texts, so that a long one does not hold up
    the event loop, nor the short ones of others.
    """

    def __init__(
        self,
        tokenizer: Any,
        images: Images,
        vocabulary: int,
        longest: int,
        chars_per_token: int,
        template: str | None = None,
    ) -> None:
        """vocabulary: how many ids the model, or any adapter, has embeddings for. longest: tokens of a
        sequence. template: instead of the chat template of the processor or of the tokenizer.
        """
        self.hf = tokenizer
        self.images = images
        self.vocabulary = vocabulary
        self._longest = longest
        self._most_chars = longest * chars_per_token
        self._template = template or _default(getattr(images.processor, "chat_template", None))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf_paged tokenizer")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="hf_paged tokenizer of long texts")
        self.shown = decode_of(tokenizer)
        self.whole = decode_of(tokenizer, skip_special_tokens=False)
        self.bytes = cache(bytes_of(tokenizer, self.whole))
        """The bytes of a token: kept, at most one for each entry of the vocabulary."""

    @property
    def chats(self) -> bool:
        """True if chats can be written: there is a template."""
        return bool(self._chat_template)

    @property
    def _chat_template(self) -> Any:
        return self._template or getattr(self.hf, "chat_template", None)

    def close(self) -> None:
        """End the threads."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)

    async def ids(self, prompt: Any, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a text, or ids that the model knows."""
        if isinstance(prompt, str):
            self._require_short(len(prompt), "prompt")
            found = await self._aside(lambda: self._encode(prompt, add_special_tokens), len(prompt))
        else:
            found = tuple(prompt)
            if len(found) > self._longest:
                raise invalid(
                    f"the prompt has {len(found)} tokens and a sequence at most {self._longest}; shorten it",
                    "prompt",
                    "context_length_exceeded",
                )
        return self._known(found)

    async def chat(self, request: ChatFields) -> ChatPrompt:
        """The prompt of a chat, through its template."""
        urls = [url for each in request.messages for url in each.images]
        if urls:
            self.images.check(len(urls))
        messages = [_shown(each, self.images.processor is not None) for each in request.messages]
        length = sum(map(_length, messages))
        self._require_short(length, "messages")
        extra = dict(request.chat_template_kwargs or {})
        taken = sorted(RESERVED & extra.keys())
        if taken:
            raise invalid(
                f"chat_template_kwargs must not have {taken}; leave them out", "chat_template_kwargs"
            )
        if request.offered:
            extra["tools"] = shown_tools(request.offered)
        if request.reasoning_effort is not None:
            self._require_effort()
            extra["reasoning_effort"] = request.reasoning_effort
        options = {
            "add_generation_prompt": request.add_generation_prompt is not False
            and not request.continue_final_message,
            "continue_final_message": bool(request.continue_final_message),
        }
        if request.continue_final_message and request.add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt exclude each other; give one of them",
                "continue_final_message",
            )
        text = await self._aside(lambda: self._written(messages, {**extra, **options}), length)
        special = request.add_special_tokens
        if special is None:  # templates of processors may leave the first token to the tokenizer
            first = getattr(self.hf, "bos_token", None)
            begun = first is None or text.startswith(first)
            special = self.images.processor is not None and not begun
        if urls:
            found = await self.images.prompt(text, urls, special)
        else:
            found = ChatPrompt(await self._aside(lambda: self._encode(text, special), len(text)))
        self._known(found.ids)
        return found

    async def trial(self) -> ChatPrompt:
        """A chat with an image, by which it is found out whether the model takes one."""
        parts = [{"type": "image_url", "image_url": {"url": BLANK}}, {"type": "text", "text": "?"}]
        return await self.chat(ChatFields.model_validate({"messages": [{"role": "user", "content": parts}]}))

    def text(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of ids."""
        self._known(tuple(ids), "tokens")
        return (self.shown if skip_special_tokens else self.whole)(ids)

    async def decoded(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids that a client has sent."""
        self._require_short(len(ids), "tokens")
        return await self._aside(lambda: self.text(list(ids), skip_special_tokens), len(ids))

    async def names(self, ids: Sequence[int]) -> list[str]:
        """How each of some tokens reads by itself."""
        return await self._aside(lambda: [self.token(each) for each in ids], len(ids))

    def count(self, text: str) -> int:
        """How many tokens a text has."""
        return len(self._encode(text, False)) if text else 0

    def token(self, token: int) -> str:
        """How one token reads by itself."""
        return text_of(self.bytes(token))

    def offsets(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """Where in the text of ids each of them begins."""
        text = Detokeniser(self.shown if skip_special_tokens else self.whole)
        found = []
        length = 0
        for token in ids:
            found.append(length)
            length += len(text.add([token], False))
        return found

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        return tuple(self.hf(text, add_special_tokens=special)["input_ids"])

    def _written(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """A chat as its template writes it."""
        if not self.chats:
            raise invalid(
                "this model has no chat template; use /v1/completions, or serve with --chat-template",
                "messages",
            )
        chosen = {} if self._template is None else {"chat_template": self._template}
        try:
            text: str = self.hf.apply_chat_template(messages, tokenize=False, **chosen, **options)
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise invalid(
                f"the chat template cannot render these messages: {error!s:.300}", "messages"
            ) from error
        self._require_short(len(text), "messages")
        return text

    def _require_effort(self) -> None:
        if "reasoning_effort" not in str(self._chat_template or ""):
            raise invalid(
                "the chat template does not use reasoning_effort; leave it out, or see chat_template_kwargs",
                "reasoning_effort",
            )

    async def _aside(self, act: Callable[[], T], size: int) -> T:
        return await aside(self._long if size > LONG else self._thread, act)

    def _require_short(self, length: int, name: str) -> None:
        if length > self._most_chars:
            raise too_large(
                f"{name} has {length} characters or ids and at most {self._most_chars} are read; shorten it",
                name,
            )

    def _known(self, ids: tuple[int, ...], name: str = "prompt") -> tuple[int, ...]:
        if not ids and name == "prompt":
            raise invalid("the prompt has no tokens; give it at least one", name)
        if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            wrong = next(each for each in ids if not 0 <= each < self.vocabulary)
            raise invalid(
                f"{name} has the token id {wrong} and the vocabulary those from 0 to {self.vocabulary - 1}; "
                "POST /tokenize has the ids of a text",
                name,
            )
        return ids


def _default(templates: Any) -> str | None:
    """The template of chats among those of a processor."""
    found: str | None = templates.get("default") if isinstance(templates, dict) else templates
    return found


def _length(message: dict[str, Any]) -> int:
    """The characters of a message's texts."""
    content = message.get("content", "")
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text", "")) for part in content)


def _shown(message: Message, in_parts: bool) -> dict[str, Any]:
    """A message as chat templates take it: content as one text, or in parts as templates of processors do;
    arguments of calls as objects.
    """
    found = message.model_dump(exclude_none=True, exclude={"content"})
    content = message.content
    if content is None:  # beside calls of tools; templates read it all the same
        found["content"] = ""
    else:
        parts = [TextPart(type="text", text=content)] if isinstance(content, str) else content
        if in_parts:
            shown = [
                {"type": "image"} if isinstance(each, ImagePart) else each.model_dump() for each in parts
            ]
            found["content"] = shown
        else:
            found["content"] = "".join(each.text for each in parts if isinstance(each, TextPart))
    if not found.get("tool_calls"):
        found.pop("tool_calls", None)
    for call in found.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            raise invalid("the arguments of a tool call are not JSON; give an object", "messages") from None
    return found
