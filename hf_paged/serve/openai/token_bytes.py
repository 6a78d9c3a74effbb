"""The bytes of single tokens, as the vocabulary has them: decoding one alone strips blanks and bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ...engine.outputs.text import Decode

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
UNPRINTABLE = [byte for byte in range(256) if byte not in PRINTABLE]
BYTES = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(UNPRINTABLE)}
"""The bytes that the characters of a byte-level vocabulary stand for, as in GPT-2's."""
FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""A byte in a vocabulary of characters."""


def bytes_of(tokenizer: Any, whole: Decode) -> Callable[[int], bytes]:
    """The function from a token to the bytes that it stands for, by its entry in the vocabulary and the kind
    of decoder. whole: decodes what follows no known rule.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    rules = {} if decoder is None else json.loads(decoder.__getstate__())
    steps = rules.get("decoders", [rules] if rules else [])
    kinds = {each["type"] for each in steps}
    byte_level = "ByteLevel" in kinds
    falls_back = "ByteFallback" in kinds
    blanks = [
        each.get("replacement") or each["pattern"].get("String", " ")
        for each in steps
        if each["type"] == "Metaspace" or (each["type"] == "Replace" and each.get("content") == " ")
    ]
    added = set(getattr(tokenizer, "added_tokens_decoder", ()))

    def bytes_of_token(token: int) -> bytes:
        entry = None if backend is None else backend.id_to_token(token)
        if entry is None:
            return whole([token]).encode()
        if token in added:
            return str(entry).encode()
        if byte_level and all(each in BYTES for each in entry):
            return bytes(BYTES[each] for each in entry)
        byte = FALLBACK.fullmatch(entry) if falls_back else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        if not blanks:
            return whole([token]).encode()
        for each in blanks:
            entry = entry.replace(each, " ")
        return str(entry).encode()

    return bytes_of_token


def text_of(found: bytes) -> str:
    """The bytes of a token as a text; parts of characters by their numbers, as OpenAI writes them."""
    try:
        return found.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
