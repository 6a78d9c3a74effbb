"""An operator's limits, each a flag of `hf-paged serve`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TypeVar

T = TypeVar("T", int, float)
MIB = 2**20
MAY_BE_ZERO = ("waiting", "logprobs", "drain_seconds", "images")
"""Limits under which nothing at all is let in."""


def _limit(default: T, meaning: str) -> T:
    """A field of ServerLimits with the text of its flag's help."""
    found: T = field(default=default, metadata={"help": meaning})
    return found


@dataclass(frozen=True)
class ServerLimits:
    """The limits of one request and one server. Every limit has a flag: `--limit-body-bytes` and so on."""

    body_bytes: int = _limit(8 * MIB, "bytes of a request's body")
    body_values: int = _limit(2**18, "numbers, texts, lists and objects in a request's body")
    bodies_bytes: int = _limit(256 * MIB, "bytes of all bodies that are being read, beyond 64 KiB of each")
    prompts: int = _limit(128, "prompts in one request")
    n: int = _limit(128, "answers to a prompt; at most --max-num-seqs")
    stop: int = _limit(16, "stop strings of a request")
    stop_chars: int = _limit(256, "characters of a stop string")
    logprobs: int = _limit(20, "alternatives beside a token")
    logit_bias: int = _limit(1024, "tokens with a bias, and stop token ids")
    grammar_chars: int = _limit(65536, "characters of a JSON schema, a pattern or a grammar")
    tools: int = _limit(128, "tools of a chat")
    shown_tokens: int = _limit(
        2**20, "tokens of prompts in an answer: of all prompts, times answers, times 1 + alternatives"
    )
    chars_per_token: int = _limit(
        16, "a text of more characters than this times the longest sequence is not tokenized"
    )
    waiting: int = _limit(1024, "prompts beyond those that can run; more are answered with 429")
    connections: int = _limit(4096, "requests that are being read or answered; more are answered with 503")
    request_seconds: float = _limit(600.0, "seconds from arrival to the last token")
    body_seconds: float = _limit(30.0, "seconds until a body is complete")
    write_seconds: float = _limit(60.0, "seconds in which a client must read something of what was sent")
    drain_seconds: float = _limit(30.0, "seconds from SIGTERM to the end of all answers")
    images: int = _limit(8, "images of a request")
    image_pixels: int = _limit(2**25, "pixels of all images of a request")
    media_bytes: int = _limit(2**30, "bytes of the inputs made of images, for all requests under way")
    viewers: int = _limit(16, "streams of the map at once")
    adapters: int = _limit(128, "adapters that are loaded at once, where requests may load them")

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            whole = isinstance(each.default, int)
            least = 0 if each.name in MAY_BE_ZERO else 1 if whole else 0.001
            kinds = (int,) if whole else (int, float)
            if type(value) not in kinds or not least <= value < 2**53:
                flag = "--limit-" + each.name.replace("_", "-")
                expected = "a whole number" if whole else "a number"
                raise ValueError(f"{flag} {value!r} is out of range; give {expected} from {least} on")
