"""openai-python, a client of others, against a server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai
from serving import Served, generated, serving, text

KEY = "a-key"
ROOT = Path(__file__).resolve().parent.parent
CHAT = [{"role": "user", "content": "Tell me a story"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(api_keys=(KEY,)) as made:
        yield made


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.mark.parametrize("page", ["README.md", "docs/serving.md"])
def test_the_clients_of_a_page(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands that a page shows for openai-python and curl, against a server without keys."""
    shown = (ROOT / page).read_text()
    code = next(each for each in re.findall(r"```python\n(.*?)```", shown, re.S) if "OpenAI(" in each)
    body = json.loads(re.search(r"curl http://127.0.0.1:8000/v1/completions .*?-d '(.*?)'", shown, re.S)[1])
    with serving() as plain:
        exec(code.replace("http://127.0.0.1:8000", plain.url), {})
        asked = plain.client.post("/v1/completions", json=body).json()
    assert capsys.readouterr().out.split()
    assert asked["usage"]["completion_tokens"] == 20


def test_completions(client: openai.OpenAI) -> None:
    found = client.completions.create(model="demo", prompt="The fox", max_tokens=12, temperature=0)
    assert found.choices[0].text == text(generated("The fox", max_new_tokens=12)[0])
    assert found.choices[0].finish_reason == "length"
    assert found.usage.prompt_tokens_details.cached_tokens >= 0
    extra = client.completions.create(
        model="demo", prompt="The fox", max_tokens=12, n=2, extra_body={"use_beam_search": True}
    )
    assert len(extra.choices) == 2
    scored = client.completions.create(
        model="demo", prompt="The fox", max_tokens=3, temperature=0, logprobs=2
    )
    assert len(scored.choices[0].logprobs.token_logprobs) == 3


def test_chats_and_streams(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=12, temperature=0, logprobs=True, top_logprobs=1
    )
    assert len(whole.choices[0].logprobs.content) == 12
    stream = client.chat.completions.create(
        model="demo", messages=CHAT, max_completion_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert (
        "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
        == whole.choices[0].message.content
    )
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[0].choices[0].delta.role == "assistant"


def test_models(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "hf_paged"


def test_errors_are_the_clients_own(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="did you mean 'top_k'"):
        client.completions.create(model="demo", prompt="a", extra_body={"topk": 5})
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    twice = 2 * [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=CHAT, tools=twice)
    assert caught.value.param == "tools"
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()


def test_many_at_once(served: Served) -> None:
    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        stream = await client.completions.create(
            model="demo", prompt="The owl", max_tokens=4 + i, temperature=0, stream=True
        )
        return "".join([each.choices[0].text async for each in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(20)))

    full = generated("The owl", max_new_tokens=24)[0]
    assert asyncio.run(all_of_them()) == [text(full[: 4 + i]) for i in range(20)]


def test_the_protocol_of_vllms_benchmark(served: Served) -> None:
    """The requests of `vllm bench serve`, and how it reads the answer: a probe without a stream's end would
    stop it.
    """
    (model,) = served.client.get("/v1/models").json()["data"]
    body = {
        "model": model["id"], "prompt": "The fox", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 12, "logprobs": None,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    headers = {"x-request-id": "bench-0"}
    text = ""
    tokens = None
    ended = False
    with served.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["x-request-id"] == "bench-0"
        for line in response.iter_lines():
            if not line or line.startswith(":"):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                ended = True
                continue
            chunk = json.loads(data)
            if chunk.get("choices"):
                text += chunk["choices"][0].get("text") or ""
            elif chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    assert ended
    assert tokens == 12
    assert text
