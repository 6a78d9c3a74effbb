"""Images in chats: the answers of generate() to the same images, and what is refused before the first byte."""

from __future__ import annotations

import asyncio
import base64
import http.server
import socket
import sys
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("PIL")

import numpy
import torch
import transformers
from engine_answers import alone_with_media
from PIL import Image
from serving import Served, events, serving
from words_and_pictures import llava, picture

from hf_paged.serve.http.errors import ApiError
from hf_paged.serve.link.loading import Source
from hf_paged.serve.openai import images
from hf_paged.serve.openai.images import ChatPrompt, Images
from hf_paged_cli.limits import ServerLimits

LIMITS = {"images": 3, "image_pixels": 10_000}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def seer() -> tuple[Any, Any]:
    return llava()


@pytest.fixture(scope="module")
def served(seer: tuple[Any, Any]) -> Iterator[Served]:
    model, processor = seer
    with serving(model=model, tokenizer=processor, limits=LIMITS, api_keys=("one", "two")) as made:
        yield made
        assert made.client.get("/health").status_code == 200


def packed(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def messages(*parts: Any) -> list[dict[str, Any]]:
    """A user's message of texts and of URLs of images."""
    found = [
        {"type": "text", "text": part[1:]}
        if part[:1] == "="
        else {"type": "image_url", "image_url": {"url": part}}
        for part in parts
    ]
    return [{"role": "user", "content": found}]


def seen(number: int) -> str:
    return data_url(packed(picture(number)))


def asked(served: Served, *parts: Any, **body: Any) -> dict[str, Any]:
    response = served.post(CHAT, {"messages": messages(*parts), "max_tokens": 10, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def right(seer: tuple[Any, Any], text: str, *images: Any, **options: Any) -> list[str]:
    """The answers of stock generate()."""
    model, processor = seer
    inputs = processor(text=[text], images=list(images), return_tensors="pt")
    found = alone_with_media(model, inputs, max_new_tokens=10, **{"do_sample": False, **options})
    return [processor.decode(row, skip_special_tokens=True) for row in found]


def texts(body: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in body["choices"]]


def test_answers_are_those_of_generate(served: Served, seer: tuple[Any, Any]) -> None:
    """Whole, in a stream, of several images, of beams, in all formats, beside texts."""
    one = asked(served, seen(1), "=The fox")
    assert texts(one) == right(seer, "<image>The fox", picture(1))
    assert one["usage"]["prompt_tokens"] > 16
    two = asked(served, "=The fox", seen(1), "=went", seen(2))
    assert texts(two) == right(seer, "The fox<image>went<image>", picture(1), picture(2))
    assert texts(asked(served, seen(2), "=The fox")) != texts(one)
    beams = asked(served, seen(1), "=The fox", n=2, use_beam_search=True)
    assert texts(beams) == right(seer, "<image>The fox", picture(1), num_beams=2, num_return_sequences=2)
    chunks = served.stream(CHAT, messages=messages(seen(1), "=The fox"), max_tokens=10)
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in chunks) == texts(one)[0]
    lossless = data_url(packed(picture(1), "WEBP", lossless=True), "image/webp")
    assert texts(asked(served, lossless, "=The fox")) == texts(one)
    plain = served.post(
        CHAT, {"messages": [{"role": "user", "content": "The fox"}], "max_tokens": 10, "temperature": 0}
    )
    model, processor = seer
    ids = processor.tokenizer("The fox", return_tensors="pt")["input_ids"]
    alone = model.generate(ids, max_new_tokens=10, do_sample=False)[0, ids.shape[1] :]
    assert texts(plain.json()) == [processor.decode(alone, skip_special_tokens=True)]


def test_images_are_upright_and_without_transparency(served: Served, seer: tuple[Any, Any]) -> None:
    turned = Image.Exif()
    turned[0x0112] = 3  # upside down
    upright = asked(served, seen(1), "=The fox")
    file = packed(picture(1).rotate(180), exif=turned)
    assert texts(asked(served, data_url(file), "=The fox")) == texts(upright)
    clear = picture(1).convert("RGBA")
    assert texts(asked(served, data_url(packed(clear)), "=The fox")) == texts(upright)


def test_an_image_is_computed_once_for_a_key(served: Served) -> None:
    """The same image behind another key is found by none: neither by time nor by cached tokens."""

    def cached(key: str) -> int:
        response = served.post(
            CHAT,
            {"messages": messages(seen(7), "=The fox"), "max_tokens": 2},
            headers={"authorization": f"Bearer {key}"},
        )
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("one") == 0
    assert cached("one") >= 16
    assert cached("two") == 0


def test_tokenize_shows_the_places_of_an_image(served: Served, seer: tuple[Any, Any]) -> None:
    _, processor = seer
    found = served.post("/tokenize", {"messages": messages(seen(1), "=The fox")}).json()
    inputs = processor(text=["<image>The fox"], images=[picture(1)])
    assert found["tokens"] == list(inputs["input_ids"][0])


def with_scans(count: int) -> bytes:
    """A progressive JPEG file whose last scan is there so many times more."""
    whole = packed(picture(1), "JPEG", progressive=True)
    last = whole[whole.rfind(b"\xff\xc4", 0, whole.rfind(b"\xff\xda")) : -2]
    return whole[:-2] + last * count + whole[-2:]


def broken() -> dict[str, Any]:
    whole = packed(picture(1))
    bomb = bytearray(whole)
    bomb[16:24] = (60_000).to_bytes(4, "big") * 2  # the size in the header, whose checksum is wrong now
    frames = [picture(1), picture(2)]
    return {
        "base64": "data:image/png;base64,%%%",
        "no base64": "data:image/png,abc",
        "empty": "data:image/png;base64,",
        "text": data_url(b"no image"),
        "cut": data_url(whole[:200]),
        "damaged": data_url(whole[:60] + b"\x00" * 40 + whole[100:]),
        "bomb": data_url(bytes(bomb)),
        "scans": data_url(with_scans(40), "image/jpeg"),
        "vector": data_url(b'<svg xmlns="http://www.w3.org/2000/svg"/>', "image/svg+xml"),
        "postscript": data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n"),
        "other format": data_url(packed(picture(1), "BMP"), "image/bmp"),
        "animated": data_url(packed(frames[0], "GIF", save_all=True, append_images=frames[1:]), "image/gif"),
        "remote": "http://127.0.0.1:1/a.png",
        "file": "file:///etc/passwd",
        "path": "/etc/passwd",
    }


@pytest.mark.parametrize("name", list(broken()))
def test_broken_images_are_refused_before_the_first_byte(served: Served, name: str) -> None:
    for stream in (False, True):
        response = served.post(
            CHAT, {"messages": messages(broken()[name], "=a"), "max_tokens": 2, "stream": stream}
        )
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == "messages"
        assert "send" in error["message"] or "not base64" in error["message"]
        assert "0x" not in error["message"]  # an address of the process's memory


def test_odd_images_are_answered(served: Served) -> None:
    """One pixel, a long strip, and the scans of a usual progressive JPEG file."""
    for image in (Image.new("RGB", (1, 1)), Image.new("1", (600, 6))):
        assert texts(asked(served, data_url(packed(image)), "=The fox"))[0]
    assert texts(asked(served, data_url(with_scans(1), "image/jpeg"), "=The fox"))[0]


@pytest.mark.parametrize("parts", [b"\xff\xfe\x00\x02", b"\xff", b"\xff\xff\x00", b"\xff\xda\x00\x02"])
def test_hostile_files_are_refused_in_time(seer: tuple[Any, Any], parts: bytes) -> None:
    """A megabyte of comments, of fill bytes or of scans: counting them takes no longer than reading them."""
    reader = Images(seer[1], ServerLimits())
    file = b"\xff\xd8" + parts * (2**20 // len(parts))
    begun = time.process_time()
    with pytest.raises(ApiError, match="image 1 cannot be read"):
        asyncio.run(reader.prompt("<image>", [data_url(file, "image/jpeg")], False))
    assert time.process_time() - begun < 10
    reader.close()


def test_limits_of_images(served: Served) -> None:
    def status(*parts: str, **body: Any) -> tuple[int, str]:
        response = served.post(CHAT, {"messages": messages(*parts), "max_tokens": 2, **body})
        return response.status_code, response.json()["error"]["message"]

    assert status(*[seen(1)] * 4)[0] == 400
    large = data_url(packed(Image.new("RGB", (101, 100))))
    code, message = status(large)
    assert (code, "101 x 100" in message) == (413, True)
    code, message = status(data_url(packed(Image.new("1", (909, 9)))))
    assert (code, "100 times" in message) == (400, True)  # a processor would make it 909 / 9 times its height
    half = data_url(packed(Image.new("RGB", (80, 80))))
    code, message = status(half, half)
    assert (code, "image 2" in message) == (413, True)
    code, message = status(seen(1), "=<image> The fox")  # a text must not bring a place for an image
    assert (code, "processor" in message) == (400, True)
    assert status(seen(1), prompt_logprobs=1)[0] == 400
    other = [{"role": "assistant", "content": messages(seen(1))[0]["content"]}]
    assert "messages of the user" in served.refusal(CHAT, messages=other)["message"]
    part = {"type": "image_url", "image_url": {"url": seen(1), "detail": "high"}}
    assert "detail" in served.refusal(CHAT, messages=[{"role": "user", "content": [part]}])["message"]
    assert "image_url" in served.refusal(CHAT, messages=messages("=a"), images=["a"])["message"]


def test_inputs_of_requests_under_way_are_bounded() -> None:
    images = Images(None, ServerLimits(media_bytes=1000))
    prompt = ChatPrompt((5,), {"pixel_values": numpy.zeros(75), "sizes": [numpy.zeros(25)]})
    with images.held([prompt]):
        with pytest.raises(ApiError) as refused, images.held([prompt]):
            pass
        assert refused.value.status == 429
    with images.held([prompt]):
        pass
    with pytest.raises(ApiError) as refused, images.held([prompt, prompt]):
        pass
    assert refused.value.status == 413
    images.close()


class Files(http.server.BaseHTTPRequestHandler):
    """Another host, with images and with answers that lead elsewhere."""

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", "/a.png")
            self.end_headers()
        elif self.path == "/a.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(packed(picture(1)))
        elif self.path == "/long":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"\x00" * 30_000)
        else:
            self.send_error(404)

    def log_message(self, *arguments: Any) -> None:
        pass


def test_images_of_allowed_hosts(seer: tuple[Any, Any]) -> None:
    """Of no other one, by no detour, and no more than a body may have."""
    host = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=host.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{host.server_port}"
    model, processor = seer
    limits = {"body_bytes": 20_000}
    with serving(
        model=model, tokenizer=processor, limits=limits, allowed_media_domains=("127.0.0.1",)
    ) as served:
        assert texts(asked(served, f"{url}/a.png", "=The fox")) == texts(asked(served, seen(1), "=The fox"))
        for wrong in (
            f"{url}/none", f"{url}/moved", f"http://localhost:{host.server_port}/a.png", "ftp://127.0.0.1/a.png",
            f"http://127.0.0.1@localhost:{host.server_port}/a.png", f"http://localhost\\@127.0.0.1:{host.server_port}/a.png",
            "http://127.0.0.1:1/a.png", "http://127.0.0.1:99999/a.png",
        ):  # fmt: skip
            assert served.refusal(CHAT, messages=messages(wrong, "=a"))["param"] == "messages"
        response = served.post(CHAT, {"messages": messages(f"{url}/long")})
        assert response.status_code == 413
    host.shutdown()
    host.server_close()


def test_models_that_take_no_images() -> None:
    with serving() as served:
        found = served.refusal(CHAT, messages=messages(seen(1), "=a"))
        assert "LlamaForCausalLM takes none" in found["message"]
        assert found["code"] == "unsupported_parameter"


def test_images_that_fail_at_the_start_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """A processor that does not belong to the model: texts are served, and the log has the reason."""
    model, processor = llava()
    processor.num_additional_image_tokens = 0
    with serving(model=model, tokenizer=processor) as served:
        found = served.refusal(CHAT, messages=messages(seen(1), "=a"))
        assert "images are not accepted" in found["message"]
        assert "tokens" in found["message"]
        assert any("images are not served" in each.message for each in caplog.records)
        assert asked(served, "=The fox")["choices"]


def test_without_pillow(seer: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    chat = messages(seen(1))
    monkeypatch.setitem(sys.modules, "PIL", None)
    model, processor = seer
    with serving(model=model, tokenizer=processor) as served:
        assert "pip install pillow" in served.refusal(CHAT, messages=chat)["message"]


def test_the_processor_of_a_checkpoint(
    seer: tuple[Any, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is loaded where the model takes images; a checkpoint without one is served without images."""
    model, processor = seer
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    assert isinstance(Source(str(tmp_path)).load_processor(), transformers.LlavaProcessor)
    for file in tmp_path.glob("*processor_config.json"):
        file.unlink()
    assert isinstance(Source(str(tmp_path)).load_processor(), transformers.PreTrainedTokenizerBase)
    assert any("images are not served" in each.message for each in caplog.records)
    assert isinstance(Source("demo").load_processor(), transformers.PreTrainedTokenizerBase)


def test_openai_python(served: Served, seer: tuple[Any, Any]) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="one", max_retries=0) as client:
        found = client.chat.completions.create(
            model="demo", messages=messages(seen(1), "=The fox"), max_tokens=10, temperature=0
        )
        assert [found.choices[0].message.content] == right(seer, "<image>The fox", picture(1))
        parts = [{"type": "input_image", "image_url": seen(1)}, {"type": "input_text", "text": "The fox"}]
        response = client.responses.create(
            model="demo", input=[{"role": "user", "content": parts}], max_output_tokens=10, temperature=0
        )
        assert response.output_text == found.choices[0].message.content


def test_random_bytes_as_images(served: Served) -> None:
    """Damage anywhere in a file gives an answer or 400, and the server goes on."""
    dice = torch.Generator().manual_seed(3)
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = packed(picture(1), kind)
        for _ in range(15):
            file = bytearray(whole)
            for place in torch.randint(0, len(file), (4,), generator=dice).tolist():
                file[place] = int(torch.randint(0, 256, (1,), generator=dice))
            body = {"messages": messages(data_url(bytes(file)), "=a"), "max_tokens": 1, "stream": True}
            response = served.post(CHAT, body)
            assert response.status_code in (200, 400, 413), response.text
            if response.status_code == 200:
                assert not any("error" in each for each in events(response.text))


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nx: ", b""], ids=["head", "status line"])
def test_a_host_that_drips_its_head_is_left_in_time(
    seer: tuple[Any, Any], head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, and the head never ends: the deadline is of the whole fetch."""
    monkeypatch.setattr(images, "FETCH_SECONDS", 0.5)
    over = threading.Event()
    dripped = threading.Event()

    def drip(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client:
            client.sendall(head)
            try:
                while not over.wait(0.05):
                    client.sendall(b"a")
            except OSError:
                dripped.set()  # the fetcher has left

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        fetcher = Images(seer[1], ServerLimits(), ("127.0.0.1",))
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/a.png"
            with pytest.raises(ApiError, match=r"took longer than 0\.5 s"):
                asyncio.run(fetcher.prompt("a", [url], False))
            assert dripped.wait(60)
        finally:
            over.set()
            thread.join()
            fetcher.close()
