"""/v1/completions: the tokens of generate(), in one body and in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
import torch

pytest.importorskip("fastapi")

from releases import FLAT_STATES
from serving import Served, generated, ids, serving, text, tokenizer

from hf_paged import demo


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


def test_an_answer_is_that_of_generate(served: Served) -> None:
    for prompt in demo.prompts():
        found = served.complete(prompt, max_tokens=24, return_token_ids=True)
        choice = found["choices"][0]
        (wanted,) = generated(prompt, max_new_tokens=24)
        assert choice["token_ids"] == wanted
        assert choice["text"] == text(wanted)
        assert choice["prompt_token_ids"] == ids(prompt)
        assert choice["finish_reason"] == ("stop" if wanted[-1] == 1 else "length")
        usage = found["usage"]
        assert usage["prompt_tokens"] == len(ids(prompt))
        assert usage["completion_tokens"] == len(wanted)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
        assert found["model"] == "demo"
        assert found["object"] == "text_completion"


def test_a_stream_is_the_same_in_pieces(served: Served) -> None:
    chunks = served.stream(prompt="The fox", max_tokens=120, stream_options={"include_usage": True})
    *parts, last = chunks  # tokens that come while the server is busy are one of them
    (wanted,) = generated("The fox", max_new_tokens=120)
    assert "".join(part["choices"][0]["text"] for part in parts) == text(wanted)
    assert [part["choices"][0]["finish_reason"] for part in parts if part["choices"][0]["finish_reason"]] == [
        "length"
    ]
    assert len(parts) > 10
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(wanted)
    assert len({part["id"] for part in chunks}) == 1


def test_requests_at_once_get_their_own_answers(served: Served) -> None:
    """Streams and others, greedy and drawn, from many connections."""
    prompts = demo.prompts() * 3

    def ask(i: int) -> str:
        body = {"prompt": prompts[i], "max_tokens": 8 + i}
        if i % 2:
            return "".join(each["choices"][0]["text"] for each in served.stream(**body))
        return served.complete(**body)["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(len(prompts))))
    assert found == [text(generated(each, max_new_tokens=8 + i)[0]) for i, each in enumerate(prompts)]


def test_prompts_in_all_forms(served: Served) -> None:
    """A text, a list of texts, ids, and a list of lists of ids."""
    first, second = demo.prompts()[:2]
    wanted = [text(generated(each, max_new_tokens=8)[0]) for each in (first, second)]
    for prompt, answers in (
        (first, wanted[:1]),
        ([first, second], wanted),
        (ids(first), wanted[:1]),
        ([ids(first), ids(second)], wanted),
    ):
        found = served.complete(prompt, max_tokens=8)
        assert [choice["text"] for choice in found["choices"]] == answers
        assert [choice["index"] for choice in found["choices"]] == list(range(len(answers)))
        chunks = served.stream(prompt=prompt, max_tokens=8)
        for i, answer in enumerate(answers):
            assert "".join(c["text"] for each in chunks for c in each["choices"] if c["index"] == i) == answer


def test_n_beams_and_n_answers(served: Served) -> None:
    found = served.complete("The fox", max_tokens=12, n=3, use_beam_search=True, return_token_ids=True)
    wanted = generated("The fox", max_new_tokens=12, num_beams=3, num_return_sequences=3)
    assert [choice["token_ids"] for choice in found["choices"]] == wanted


@FLAT_STATES
def test_a_hybrid_over_http() -> None:
    """Tokens of stock's generate(), streamed and not, and turns of a chat that begin with cached states."""
    model = tiny.build("causal", tiny.config_class("causal", "qwen3_5_text"))
    prompt = list(range(3, 83))

    def stock(given: list[int], new: int) -> list[int]:
        out = model.generate(torch.tensor([given]), max_new_tokens=new, min_new_tokens=new, do_sample=False)
        return list(out[0, len(given) :].tolist())

    with serving(model=model, engine={"state_slots": 4, "state_snapshots": 4}) as made:
        options = {"max_tokens": 8, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        first = made.complete(prompt, **options)
        answer = first["choices"][0]["token_ids"]
        assert answer == stock(prompt, 8)
        chunks = made.stream(prompt=prompt, **options)
        assert [token for each in chunks for token in each["choices"][0]["token_ids"]] == answer
        turn = [*prompt, *answer, 5, 6, 7]
        second = made.complete(turn, **options)
        assert second["choices"][0]["token_ids"] == stock(turn, 8)
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= len(prompt) + 7  # all that was computed
        assert made.engine.stats()["states"]["hits"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_not_shown_and_ends_the_answer(served: Served, stream: bool) -> None:
    full = text(generated("The fox", max_new_tokens=40)[0])
    stop = full[20:24]
    wanted = full[: full.index(stop)]
    for more, shown in (({}, wanted), ({"include_stop_str_in_output": True}, wanted + stop)):
        body = {"prompt": "The fox", "max_tokens": 40, "stop": ["never", stop], **more}
        if stream:
            chunks = [each["choices"][0] for each in served.stream(**body)]
            assert "".join(each["text"] for each in chunks) == shown
            assert chunks[-1]["finish_reason"] == "stop"
        else:
            choice = served.complete(**body)["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (shown, "stop")


def test_a_stop_string_in_the_prompt_ends_nothing(served: Served) -> None:
    found = served.complete("The fox", max_tokens=8, stop="fox")["choices"][0]
    assert found["text"] == text(generated("The fox", max_new_tokens=8)[0])
    assert found["finish_reason"] == "length"


@pytest.mark.parametrize("beams", [False, True])
def test_a_stop_string_ends_nothing_within_min_tokens(served: Served, beams: bool) -> None:
    """As in vLLM: an answer has that many tokens, whatever is in them."""
    asked = {"max_tokens": 12, "stop": ["a"], "use_beam_search": beams, "n": 2 if beams else 1}
    answer = served.complete(min_tokens=5, return_token_ids=True, **asked)["choices"][0]
    begin = text(answer["token_ids"][:5])
    assert len(answer["token_ids"]) > 5
    assert answer["text"].startswith(begin)
    assert "a" in begin
    assert "a" not in answer["text"].removeprefix(begin)
    assert answer["finish_reason"] == "stop"


def test_ends_of_sequence(served: Served) -> None:
    """ignore_eos goes on behind them, stop_token_ids are more of them and are not shown, min_tokens waits."""
    (plain,) = generated("The fox", max_new_tokens=200)
    assert plain[-1] == 1
    more = len(plain) + 4
    on = served.complete("The fox", max_tokens=more, ignore_eos=True, return_token_ids=True)["choices"][0]
    assert on["token_ids"][: len(plain)] == plain
    assert len(on["token_ids"]) == more
    assert on["finish_reason"] == "length"
    end = plain[5]
    stopped = served.complete("The fox", max_tokens=40, stop_token_ids=[end], return_token_ids=True)[
        "choices"
    ][0]
    length = plain.index(end) + 1
    assert stopped["token_ids"] == plain[:length]
    assert stopped["text"] == text(plain[: length - 1])
    assert stopped["finish_reason"] == "stop"
    late = served.complete("The fox", max_tokens=more, min_tokens=more, return_token_ids=True)["choices"][0]
    assert late["token_ids"] == generated("The fox", max_new_tokens=more, min_new_tokens=more)[0]


def test_special_tokens_are_shown_on_demand(served: Served) -> None:
    tokens = generated("The fox", max_new_tokens=200)[0]
    found = served.complete("The fox", max_tokens=200, skip_special_tokens=False)["choices"][0]["text"]
    assert found == tokenizer().decode(tokens)
    assert found.endswith("<|eos|>")


def test_echo_shows_the_prompt_first(served: Served) -> None:
    answer = text(generated("The fox", max_new_tokens=6)[0])
    assert served.complete("The fox", max_tokens=6, echo=True)["choices"][0]["text"] == "The fox" + answer
    chunks = served.stream(prompt="The fox", max_tokens=6, echo=True)
    assert "".join(each["choices"][0]["text"] for each in chunks) == "The fox" + answer
    nothing = served.complete("The fox", max_tokens=0, echo=True)
    assert nothing["choices"][0]["text"] == "The fox"
    assert nothing["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert served.stream(prompt=["The fox", "An owl"], max_tokens=0, echo=True)[-1]["choices"][0][
        "finish_reason"
    ]


def test_logprobs_of_completions(served: Served) -> None:
    output = served.engine.submit(ids("The fox"), max_new_tokens=6, do_sample=False, logprobs=2).result(60)
    notes = output.sequences[0].logprobs
    found = served.complete("The fox", max_tokens=6, logprobs=2)["choices"][0]
    assert found["logprobs"]["token_logprobs"] == pytest.approx([note.logprob for note in notes], abs=1e-4)
    assert "".join(found["logprobs"]["tokens"]) == found["text"]
    for top, note in zip(found["logprobs"]["top_logprobs"], notes, strict=True):
        assert set(top) >= {tokenizer().decode([token]) for token, _ in note.top_logprobs}
    offsets = found["logprobs"]["text_offset"]
    assert [
        found["text"][i:].startswith(t) for i, t in zip(offsets, found["logprobs"]["tokens"], strict=True)
    ] == [True] * 6
    chunks = [each["choices"][0] for each in served.stream(prompt="The fox", max_tokens=6, logprobs=0)]
    streamed = [value for each in chunks if each["logprobs"] for value in each["logprobs"]["token_logprobs"]]
    assert streamed == pytest.approx([note.logprob for note in notes], abs=1e-4)


def test_a_special_token_is_a_stop_string(served: Served) -> None:
    """Where it is shown and where it is not; a part of its name is one where it is shown."""
    user = tokenizer().convert_tokens_to_ids("<|user|>")
    asked = {"max_tokens": 6, "logit_bias": {str(user): 100}, "return_token_ids": True}
    for stop, shown, ended in (
        ("<|user|>", True, True),
        ("<|user|>", False, True),
        ("user", True, True),
        ("user", False, False),
    ):
        found = served.complete("The fox", stop=stop, skip_special_tokens=not shown, **asked)["choices"][0]
        assert found["finish_reason"] == ("stop" if ended else "length")
        assert found["text"] == ("<|" if stop == "user" and shown else "")
        assert len(found["token_ids"]) == 1 or stop == "user"


def test_equal_beginnings_are_computed_once(served: Served) -> None:
    long = " ".join(demo.prompts())
    served.complete(long, max_tokens=2)
    assert served.complete(long, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
    salted = served.complete(long, max_tokens=2, cache_salt="mine")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_what_asks_for_nothing_is_taken(served: Served) -> None:
    served.complete(
        max_tokens=2, best_of=1, suffix=None, user="me", service_tier="auto", tools=[], tool_choice="auto", logit_bias=None, stop=None, n=1,
        top_p=1, presence_penalty=0, frequency_penalty=0.0, stream=False, priority=0, length_penalty=1.0,
        response_format={"type": "text"}, metadata={"a": "b"}, store=False, model="demo",
    )  # fmt: skip


def test_unseen_names_of_models(served: Served) -> None:
    response = served.post("/v1/completions", {"prompt": "a", "model": "other"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert served.client.get("/v1/models/demo").json()["id"] == "demo"
    assert served.client.get("/v1/models/other").status_code == 404


def test_what_does_not_fit_is_refused_with_the_numbers(served: Served) -> None:
    longest = served.service.longest
    prompt = [5] * 10
    found = served.refusal(prompt=prompt, max_tokens=longest - 9)
    assert str(longest) in found["message"]
    assert found["code"] == "context_length_exceeded"
    assert served.refusal(prompt=[5] * longest)["code"] == "context_length_exceeded"
    assert "0 to 847; POST /tokenize has the ids of a text" in served.refusal(prompt=[5, 999999])["message"]
    assert "vocabulary" in served.refusal(prompt=[-1])["message"]
    assert "limit is 32" in served.refusal(n=33, temperature=1)["message"]
    assert "at least one" in served.refusal(prompt="", add_special_tokens=False)["message"]
    assert served.post("/v1/completions", {"prompt": "x" * (32 * longest + 1)}).status_code == 413


def test_the_best_of_some_samples(served: Served) -> None:
    """By the mean logprob of their tokens; the usage counts all of them."""
    asked = {"prompt": ["The fox", "An owl"], "max_tokens": 8, "temperature": 1.3, "seed": 5}
    every = served.complete(**asked, n=4, logprobs=0)

    def likeliest(prompt: int) -> list[str]:
        choices = every["choices"][4 * prompt : 4 * prompt + 4]
        means = [
            sum(each["logprobs"]["token_logprobs"]) / len(each["logprobs"]["tokens"]) for each in choices
        ]
        assert len(set(means)) > 2
        return [choices[i]["text"] for i in sorted(range(4), key=lambda i: -means[i])]

    for n in (1, 2):
        found = served.complete(**asked, n=n, best_of=4)
        assert [each["index"] for each in found["choices"]] == list(range(2 * n))
        assert [each["text"] for each in found["choices"]] == likeliest(0)[:n] + likeliest(1)[:n]
        assert {each["logprobs"] for each in found["choices"]} == {None}
        used = ("prompt_tokens", "completion_tokens")
        assert [found["usage"][name] for name in used] == [every["usage"][name] for name in used]
    for wrong in (
        {"best_of": 4, "stream": True}, {"best_of": 4, "use_beam_search": True, "temperature": 0}, {"best_of": 2, "n": 3},
        {"best_of": 4, "temperature": 0}, {"best_of": 33}, {"best_of": 0},
    ):  # fmt: skip
        assert "best_of" in served.refusal(**{"temperature": 1, **wrong})["message"] or wrong["best_of"] == 4
    chat = {"messages": [{"role": "user", "content": "a"}], "best_of": 2}
    assert "/v1/completions" in served.refusal("/v1/chat/completions", **chat)["message"]
