"""Scoring texts: `echo` with `logprobs`, also without an answer, and vLLM's `prompt_logprobs`; as the harnesses of
evaluations ask for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")

from serving import Served, generated, ids, serving, text, tokenizer, until

from hf_paged import demo

BOUND = 2e-4
TEXT = "The fox and the owl went to the old tree. They were happy."


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def bounded() -> Iterator[Served]:
    with serving(limits={"shown_tokens": 5000}) as made:
        yield made


@pytest.fixture(scope="module")
def roomy() -> Iterator[Served]:
    with serving(limits={"chars_per_token": 1024}) as made:
        yield made


def right(tokens: list[int]) -> torch.Tensor:
    """[tokens - 1, vocabulary]: the logprobs that each token follows."""
    with torch.no_grad():
        return demo.model()(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)


def assert_scored(found: dict[str, Any], tokens: list[int], alternatives: int) -> None:
    """The scores of these tokens are those of one forward."""
    scores = right(tokens)
    first, *own = found["token_logprobs"]
    assert first is None
    assert found["top_logprobs"][0] is None
    assert found["tokens"] == [tokenizer().decode([token]) for token in tokens]
    assert own == pytest.approx([scores[i, token].item() for i, token in enumerate(tokens[1:])], abs=BOUND)
    for i, top in enumerate(found["top_logprobs"][1:]):
        assert max(top.values()) == pytest.approx(
            scores[i].max().item() if alternatives else own[i], abs=BOUND
        )
        assert alternatives <= len(top) <= alternatives + 1 or not alternatives
    assert len(found["text_offset"]) == len(tokens)


def test_a_text_is_scored_without_an_answer(served: Served) -> None:
    bos = tokenizer().bos_token
    for prompt, shown in ((TEXT, TEXT), (ids(TEXT), bos + TEXT)):
        found = served.complete(prompt, max_tokens=0, echo=True, logprobs=1)
        (choice,) = found["choices"]
        assert (choice["text"], choice["finish_reason"]) == (shown, "length")
        assert_scored(choice["logprobs"], ids(TEXT), 1)
        assert found["usage"]["completion_tokens"] == 0
        assert found["usage"]["prompt_tokens"] == len(ids(TEXT))
        tokens = choice["logprobs"]["tokens"]
        for token, begin in zip(tokens, choice["logprobs"]["text_offset"], strict=True):
            assert shown[begin:].startswith(token) or (token == bos and begin == 0)


def test_the_answer_comes_behind_the_prompt(served: Served) -> None:
    (wanted,) = generated(TEXT, max_new_tokens=5)
    choice = served.complete(TEXT, max_tokens=5, echo=True, logprobs=2)["choices"][0]
    assert choice["text"] == TEXT + text(wanted)
    assert_scored(choice["logprobs"], ids(TEXT) + wanted, 2)
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[len(ids(TEXT))] == len(TEXT)


def test_a_stream_begins_with_the_scored_prompt(served: Served) -> None:
    body = {"prompt": [TEXT, "The owl"], "max_tokens": 5, "echo": True, "logprobs": 1}
    whole = served.complete(**body)["choices"]
    chunks = [each["choices"][0] for each in served.stream(**body)]
    for choice in whole:
        own = [each for each in chunks if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        for key in ("tokens", "text_offset"):
            assert [value for each in own for value in each["logprobs"][key]] == choice["logprobs"][key]
        found = [value for each in own for value in each["logprobs"]["token_logprobs"]]
        assert found[0] is None
        assert found[1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=BOUND)
    silent = [each["choices"][0] for each in served.stream(**{**body, "max_tokens": 0})]
    assert [each["text"] for each in silent if each["text"]] == [TEXT, "The owl"]
    assert [each["finish_reason"] for each in silent if each["finish_reason"]] == ["length"] * 2


def test_choices_of_a_context_as_a_harness_asks(served: Served) -> None:
    """Several contexts with several ends in one request of ids: sums over the ends are those of the model, and the
    context is computed once.
    """
    context = ids(TEXT * 3)
    ends = [ids(" The bear slept."), ids(" A mouse ran."), ids(" It was night.")]
    before = served.engine.stats()["tokens"]
    body = {
        "prompt": [context + end for end in ends],
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
        "seed": 1234,
    }
    found = served.complete(**body)
    computed = served.engine.stats()["tokens"] - before
    for choice, end in zip(found["choices"], ends, strict=True):
        scores = right(context + end)[len(context) - 1 :]
        own = choice["logprobs"]["token_logprobs"][len(context) : -1]
        assert sum(own) == pytest.approx(
            sum(scores[i, token].item() for i, token in enumerate(end)), abs=5 * BOUND
        )
        top = choice["logprobs"]["top_logprobs"][len(context) : -1]
        greedy = [value == max(each.values()) for value, each in zip(own, top, strict=True)]
        assert greedy == [int(scores[i].argmax()) == token for i, token in enumerate(end)]
    assert computed < len(context) + sum(map(len, ends)) + 3 * 10
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= 2 * (len(context) - 8)


def test_prompt_logprobs_in_vllms_form(served: Served) -> None:
    tokens = ids(TEXT)
    scores = right(tokens)
    found = served.complete(TEXT, max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    chat = served.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "prompt_logprobs": 0},
    ).json()
    assert found[0] is None
    for i, entry in enumerate(found[1:]):
        own = entry[str(tokens[i + 1])]
        assert own["logprob"] == pytest.approx(scores[i, tokens[i + 1]].item(), abs=BOUND)
        assert own["decoded_token"] == tokenizer().decode([tokens[i + 1]])
        assert {1, 2} <= {each["rank"] for each in entry.values()}
    assert chat["prompt_logprobs"][0] is None
    assert all(len(each) == 1 for each in chat["prompt_logprobs"][1:])


def test_what_cannot_be_scored_is_refused(served: Served) -> None:
    assert served.refusal(prompt_logprobs=1, stream=True)["param"] == "prompt_logprobs"
    assert served.refusal(prompt_logprobs=21)["param"] == "prompt_logprobs"
    assert served.refusal(echo=True, logprobs=21)["param"] == "logprobs"
    room = served.service.longest
    refused = served.refusal(prompt=[5] * room, echo=True, logprobs=1, max_tokens=0)
    assert refused["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0, "echo": True, "n": 2, "temperature": 1}, "n"),
        ({"max_tokens": 0, "echo": True, "best_of": 2, "temperature": 1}, "n"),
        ({"max_tokens": 0, "echo": True, "prompt": [[5] * 2000]}, "prompt"),
        ({"max_tokens": 0, "echo": True, "prompt": "a " * 2000}, "max_tokens"),
        ({"max_tokens": 1, "echo": True, "prompt": [[5] * 1000] * 2, "n": 3, "temperature": 1}, "prompt"),
        ({"max_tokens": 1, "echo": True, "prompt": [5] * 300, "logprobs": 20}, "prompt"),
        ({"max_tokens": 1, "prompt": [5] * 300, "prompt_logprobs": 20}, "prompt"),
        ({"max_tokens": 1, "prompt": [[5] * 1000] * 6, "return_token_ids": True}, "prompt"),
    ],
)
def test_an_answer_is_not_many_times_its_request(bounded: Served, body: dict[str, Any], param: str) -> None:
    assert bounded.refusal(**body)["param"] == param


def test_what_is_within_the_bound_is_shown(bounded: Served) -> None:
    found = bounded.complete([5] * 200, max_tokens=1, echo=True, logprobs=20)
    assert len(found["choices"][0]["logprobs"]["tokens"]) == 201
    assert bounded.complete([[5] * 1000] * 6, max_tokens=1)["choices"]


def test_detokenize_is_bounded(bounded: Served) -> None:
    assert bounded.post("/detokenize", {"tokens": [5] * 20_000}).status_code == 413
    assert bounded.post("/detokenize", {"tokens": [5] * 2000}).status_code == 200


def test_a_long_text_delays_no_short_one(roomy: Served) -> None:
    """It is tokenized in a thread of its own."""
    answers: list[str] = []

    def ask(prompt: str) -> None:
        answers.append(roomy.post("/tokenize", {"prompt": prompt}).text[:20])

    long = threading.Thread(target=ask, args=(TEXT[:16] * 62_000,))
    long.start()
    until(lambda: roomy.service.admission.in_flight == 1)
    ask("The fox")
    long.join()
    assert answers[0] == roomy.post("/tokenize", {"prompt": "The fox"}).text[:20]
