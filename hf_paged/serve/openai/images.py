"""Images in chats: read from data: URLs within limits, and made the model's inputs by its processor."""

from __future__ import annotations

import base64
import binascii
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from io import BytesIO
from typing import Any, NamedTuple, TypeVar
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, build_opener

from hf_paged_cli.limits import ServerLimits

from ..http.admission import ByteBudget
from ..http.errors import invalid, too_large
from ..http.throttle import aside

T = TypeVar("T")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats of OpenAI's API. Others are not even opened: some of their readers start programs."""
REMOTE = re.compile(r"https?://([A-Za-z0-9.-]+)(:\d+)?(/[!-\[\]-~]*)?")
"""URLs that all who read them read alike."""
JPEG = b"\xff\xd8"
"""The beginning of a JPEG file."""
MARKER = re.compile(rb"\xff([^\x00\xd0-\xd7\xff])", re.DOTALL)
"""A marker of a JPEG file, before each of its parts; the bytes of a scan have none."""
MOST_SCANS, MOST_PARTS = 32, 4096
"""Scans of a JPEG file, and parts of all kinds. A scan of 60 bytes may be a pass over all pixels; progressive
files have some ten.
"""
MOST_ASPECT = 100
"""How many times as long as wide an image may be: processors enlarge the shorter side, to some 300 pixels."""
FETCH_SECONDS = 10.0
"""For an image of another host to come."""


class ChatPrompt(NamedTuple):
    """A prompt: token ids, and what is shown among them, as arrays by the names of a forward's arguments."""

    ids: tuple[int, ...]
    media: Mapping[str, Any] = {}


class Images:
    """The images of requests for one model. A thread of its own decodes them, one request at a time."""

    def __init__(
        self, processor: Any, limits: ServerLimits, domains: Sequence[str] = (), refusal: str | None = None
    ) -> None:
        """processor: the model's, or None. domains: hosts from which images may be fetched. refusal: why the
        model takes none.
        """
        self.processor = processor
        self.refusal = refusal
        self._limits = limits
        self._domains = frozenset(each.lower() for each in domains)
        self._budget = ByteBudget(limits.media_bytes, "the images of requests under way")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf_paged images")
        self._fetchers = ThreadPoolExecutor(4, thread_name_prefix="hf_paged fetches")

    def close(self) -> None:
        """End the threads."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._fetchers.shutdown(wait=False, cancel_futures=True)

    def check(self, count: int) -> None:
        """Raise for images that are not taken, or for too many."""
        if self.refusal is not None:
            raise invalid(
                f"images are not accepted: {self.refusal}; send text", "messages", "unsupported_parameter"
            )
        if count > self._limits.images:
            raise invalid(
                f"{count} images are given and the limit is {self._limits.images}; send fewer", "messages"
            )

    async def prompt(self, text: str, urls: Sequence[str], special: bool) -> ChatPrompt:
        """The prompt of a chat, as its template wrote it, with its images.

        special: whether the tokenizer adds tokens of its own.
        """
        files = [await self._file(each) for each in urls]
        return await aside(self._thread, lambda: self.made(text, [*self._decoded(files)], special))

    def made(self, text: str, images: Sequence[Any], special: bool) -> ChatPrompt:
        """The same with images of pillow's."""
        place = getattr(self.processor, "image_token", None)
        places = text.count(place) if place else 0
        if places > len(images):  # processors of older transformers do not count
            raise invalid(
                f"the model's processor takes no such chat: {place} stands {places} times in it, and "
                f"{len(images)} images are given; leave it out of texts",
                "messages",
            )
        try:
            found = self.processor(
                text=[text], images=list(images), return_tensors="pt", add_special_tokens=special
            )
            ids = tuple(found["input_ids"][0].tolist())
        except (
            ValueError, TypeError, KeyError, IndexError, RuntimeError, ArithmeticError, StopIteration,
        ) as error:  # fmt: skip
            raise invalid(f"the model's processor takes no such chat: {error!s:.300}", "messages") from error
        of_text = ("input_ids", "attention_mask")
        return ChatPrompt(ids, {name: _plain(value) for name, value in found.items() if name not in of_text})

    @contextmanager
    def held(self, prompts: Sequence[ChatPrompt]) -> Iterator[None]:
        """Count the inputs of a request until it ends, or raise 429."""
        size = sum(_size(list(each.media.values())) for each in prompts)
        most = self._limits.media_bytes
        if size > most:
            raise too_large(f"the images become {size} bytes and the limit is {most}; send fewer", "messages")
        self._budget.take(size)
        try:
            yield
        finally:
            self._budget.give(size)

    async def _file(self, url: str) -> bytes:
        """The bytes of an image: of the URL itself, or of an allowed host."""
        if url[:5].lower() == "data:":
            return await aside(self._thread, lambda: _of_data(url))
        remote = REMOTE.fullmatch(url)
        if remote is None or remote[1].lower() not in self._domains:
            allowed = f" or on {', '.join(sorted(self._domains))}" if self._domains else ""
            raise invalid(
                f"an image is at {url[:80]!r}, expected one in a data: URL{allowed}; send "
                "data:image/png;base64,..., or have the operator allow the host by --allowed-media-domains",
                "messages",
            )
        return await aside(self._fetchers, lambda: self._fetched(url))

    def _fetched(self, url: str) -> bytes:
        most = self._limits.body_bytes
        end = time.monotonic() + FETCH_SECONDS
        found = bytearray()
        try:
            with build_opener(_NoRedirects, _InTime(end)).open(url, timeout=FETCH_SECONDS) as answer:
                while piece := answer.read1():
                    found += piece
                    if len(found) > most:
                        raise too_large(f"the image at {url[:80]!r} has more than {most} bytes", "messages")
            if time.monotonic() > end:
                raise TimeoutError
        except (OSError, HTTPException, ValueError) as error:
            late = time.monotonic() > end
            why = f"it took longer than {FETCH_SECONDS:g} s" if late else f"{error!s:.200}"
            raise invalid(f"the image at {url[:80]!r} cannot be read: {why}", "messages") from error
        return bytes(found)

    def _decoded(self, files: Sequence[bytes]) -> Iterator[Any]:
        """The files as images of pillow's, upright and in RGB as transformers loads them."""
        try:
            from PIL import Image, ImageOps
        except ImportError:
            raise invalid(
                "images are read with pillow, of transformers' extra vision; pip install pillow",
                "messages",
                "unsupported_parameter",
            ) from None
        left = self._limits.image_pixels
        for number, file in enumerate(files, 1):
            with _file_at_fault(number):
                if file.startswith(JPEG):
                    _require_few_scans(file)
                image = Image.open(BytesIO(file), formats=FORMATS)  # reads the header alone
                if getattr(image, "is_animated", False):
                    raise ValueError("it is animated")
            width, height = image.size
            left -= width * height
            self._require_size(number, width, height, left)
            with _file_at_fault(number):
                upright = ImageOps.exif_transpose(image).convert("RGB")
            yield upright

    def _require_size(self, number: int, width: int, height: int, left: int) -> None:
        """Raise for an image of too many pixels, or of a form that processors make one of too many."""
        if left < 0:
            raise too_large(
                f"image {number} has {width} x {height} pixels and the limit for all of a request is "
                f"{self._limits.image_pixels}; send smaller ones",
                "messages",
            )
        if max(width, height) > MOST_ASPECT * min(width, height):
            raise invalid(
                f"image {number} has {width} x {height} pixels, and a side may be {MOST_ASPECT} times as "
                "long as the other at most; cut it, or send it in pieces",
                "messages",
            )


class _NoRedirects(HTTPRedirectHandler):
    """An allowed host must not lead to another one."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


class _InTime(HTTPHandler, HTTPSHandler):
    """Connections that end at a time, whatever the other side sends, and however slowly."""

    def __init__(self, end: float) -> None:
        HTTPSHandler.__init__(self)
        self._end = end

    def http_open(self, request: Any) -> Any:
        return self.do_open(partial(self._made, HTTPConnection), request)

    def https_open(self, request: Any) -> Any:
        return self.do_open(partial(self._made, HTTPSConnection), request)

    def _made(self, kind: Any, host: str, **options: Any) -> Any:
        connection = kind(host, **options)
        connection._create_connection = self._connected  # below TLS, whose handshake may be slow, too
        return connection

    def _connected(self, *arguments: Any) -> socket.socket:
        made = socket.create_connection(*arguments)
        twin = socket.socket(fileno=os.dup(made.fileno()))  # of its own: TLS takes the first one's place
        timer = threading.Timer(max(0.0, self._end - time.monotonic()), _shut, [twin])
        timer.daemon = True
        timer.start()
        return made


def _shut(connection: socket.socket) -> None:
    with connection, suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _of_data(url: str) -> bytes:
    """The content of a data: URL."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise invalid(
            f"{head[:40]!r} is not a data: URL of an image; send data:image/png;base64,...", "messages"
        )
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(f"the data: URL of an image is not base64: {error}", "messages") from error


@contextmanager
def _file_at_fault(number: int) -> Iterator[None]:
    """Take whatever a decoder raises for an error of the file."""
    try:
        yield
    except Exception as error:
        raise invalid(
            f"image {number} cannot be read: {error!s:.200}; send a {', '.join(FORMATS)} file", "messages"
        ) from error


def _require_few_scans(file: bytes) -> None:
    """Raise ValueError for a JPEG file of many scans: libjpeg would take minutes for a megabyte of them."""
    scans, place = 0, 0
    for _ in range(MOST_PARTS):
        marker = MARKER.search(file, place)
        if marker is None or marker[1] == b"\xd9":  # the end of the image
            return
        place = marker.end()
        if marker[1] not in b"\x01\xd8":  # the others have a length
            place += int.from_bytes(file[place : place + 2], "big")
        scans += marker[1] == b"\xda"
        if scans > MOST_SCANS:
            raise ValueError(f"it has more than {MOST_SCANS} scans")
    raise ValueError(f"it has more than {MOST_PARTS} parts")


def _plain(value: Any) -> Any:
    """Tensors as arrays, which go to another process as they are."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.numpy() if hasattr(value, "numpy") else value


def _size(value: Any) -> int:
    return sum(map(_size, value)) if isinstance(value, list) else int(getattr(value, "nbytes", 0))
