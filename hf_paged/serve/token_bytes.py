"""The bytes of single tokens, as the vocabulary has them: decoding one alone strips blanks and bytes."""

from __future__ import annotations

import json
import re
from typing import Any

from .text import Decode

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
UNPRINTABLE = [byte for byte in range(256) if byte not in PRINTABLE]
BYTES = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(UNPRINTABLE)}
"""The bytes that the characters of a byte-level vocabulary stand for, as in GPT-2's."""
FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""A byte in a vocabulary of characters."""


class TokenBytes:
    """What each token of a tokenizer stands for, by its entry in the vocabulary and the kind of decoder."""

    def __init__(self, tokenizer: Any, whole: Decode) -> None:
        """whole: decodes what follows no known rule."""
        self._whole = whole
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(self._backend, "decoder", None)
        rules = {} if decoder is None else json.loads(decoder.__getstate__())
        steps = rules.get("decoders", [rules] if rules else [])
        kinds = {each["type"] for each in steps}
        self._byte_level = "ByteLevel" in kinds
        self._falls_back = "ByteFallback" in kinds
        self._blanks = [
            each.get("replacement") or each["pattern"].get("String", " ")
            for each in steps
            if each["type"] == "Metaspace" or (each["type"] == "Replace" and each.get("content") == " ")
        ]
        self._added = set(getattr(tokenizer, "added_tokens_decoder", ()))

    def of(self, token: int) -> bytes:
        """The bytes of a token."""
        entry = None if self._backend is None else self._backend.id_to_token(token)
        if entry is None:
            return self._whole([token]).encode()
        if token in self._added:
            return str(entry).encode()
        if self._byte_level and all(each in BYTES for each in entry):
            return bytes(BYTES[each] for each in entry)
        byte = FALLBACK.fullmatch(entry) if self._falls_back else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        if not self._blanks:
            return self._whole([token]).encode()
        for each in self._blanks:
            entry = entry.replace(each, " ")
        return str(entry).encode()


def text_of(found: bytes) -> str:
    """The bytes of a token as a text; parts of characters by their numbers, as OpenAI writes them."""
    try:
        return found.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
