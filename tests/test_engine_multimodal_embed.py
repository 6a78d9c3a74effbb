"""Prompts of embeddings: the tokens of generate(inputs_embeds=...) on that prompt alone, shared by content
(C18, C23, C24, C29).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from computed_once import computed_once
from engine_answers import PROMPTS, SCORED, alone, answers, new_tokens_of, small_engine
from engine_ways import GREEDY, WAYS
from families import BY_NAME, UNLIKE, build
from tape import record

from hf_paged.engine.multimodal.embed import names_of
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.scheduling import UNKNOWN

CAUSAL = [family for family in UNLIKE if not family.seq2seq]


def vectors(model: Any, count: int, seed: int = 0) -> torch.Tensor:
    """Embeddings [count, hidden] that are nobody's token."""
    table = model.get_input_embeddings().weight
    return (
        torch.randn(count, table.shape[1], generator=torch.Generator().manual_seed(seed))
        * table.detach().std()
    )


def right(model: Any, embeds: torch.Tensor, ids: list[int] | None = None, **options: Any) -> list[list[int]]:
    """The new tokens of generate() on these embeddings alone."""
    given = {} if ids is None else {"input_ids": torch.tensor([ids])}

    def compute() -> list[list[int]]:
        answer = model.generate(**given, inputs_embeds=embeds[None], **SCORED, **options)
        return new_tokens_of(answer, len(ids or []))

    return computed_once(compute, model, embeds, ids, options)


small = functools.partial(small_engine, num_blocks=40)


@pytest.fixture
def model() -> Any:
    return build(BY_NAME["llama"])


@pytest.mark.parametrize("family", CAUSAL, ids=lambda family: family.name)
def test_every_family(family: Any) -> None:
    """In chunks, recomputed, beside prompts of ids in the same steps; row by row where the model cannot do
    otherwise.
    """
    model = build(family)
    given = [vectors(model, count, seed=count) for count in (17, 1, 9)]
    with small(model) as engine:
        handles = [engine.submit(inputs_embeds=each, **GREEDY) for each in given]
        others = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:2]]
        for _ in range(4):
            engine.step()
        engine.pause()
        engine.resume()
        assert [answers(handle.result()) for handle in handles] == [
            right(model, each, **GREEDY) for each in given
        ]
        assert [answers(handle.result()) for handle in others] == [
            alone(model, prompt, **GREEDY) for prompt in PROMPTS[:2]
        ]
        assert handles[0].result().preemptions == 1
        engine.check()


@pytest.mark.parametrize("with_ids", [False, True], ids=["alone", "beside-ids"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way(model: Any, way: str, with_ids: bool) -> None:
    """Processors see the ids, if there are any, and the new tokens; lengths count as in generate()."""
    embeds, ids = vectors(model, 17), PROMPTS[1] if with_ids else None
    with small(model) as engine:
        output = engine.submit(ids, inputs_embeds=embeds[None], **WAYS[way]).result()
        assert answers(output) == right(model, embeds, ids, **WAYS[way])
        assert output.prompt_token_ids == (ids or [])
        handle = engine.submit(ids, inputs_embeds=embeds, **WAYS[way])
        for _ in range(5):
            engine.step()
        engine.pause()
        engine.resume()
        assert answers(handle.result()) == answers(output)


def test_draws(model: Any) -> None:
    """C35: samples of embeddings draw the same in a crowd, after a preemption, and alone."""
    options = {
        "do_sample": True,
        "num_return_sequences": 3,
        "temperature": 1.4,
        "seed": 5,
        "max_new_tokens": 9,
    }
    embeds = vectors(model, 17)
    with small(model, num_blocks=200) as roomy:
        expected = answers(roomy.submit(inputs_embeds=embeds, **options).result())
    assert len({tuple(row) for row in expected}) > 1
    with small(model) as engine:
        crowd = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
        handle = engine.submit(inputs_embeds=embeds, **options)
        for _ in range(8):
            engine.step()
        engine.pause()
        engine.resume()
        assert answers(handle.result()) == expected
        assert [answers(each.result()) for each in crowd] == [
            alone(model, prompt, **GREEDY) for prompt in PROMPTS
        ]


@pytest.mark.parametrize("way", ["greedy", "processed"])
@pytest.mark.parametrize("run_ahead", [False, True], ids=["in-step", "ahead"])
def test_a_last_token_that_no_chunk_had_room_for(model: Any, run_ahead: bool, way: str) -> None:
    """A prompt is computed to its end before its sequence joins those whose rows are token ids."""
    embeds = vectors(model, 17)
    with small(model, max_batch_tokens=8, max_batch_sequences=8, run_ahead=run_ahead) as engine:
        for first in (embeds, embeds[:9]):
            output = engine.submit(inputs_embeds=first, **WAYS[way]).result()
            assert answers(output) == right(model, first, **WAYS[way])
        assert engine.submit(inputs_embeds=embeds, **WAYS[way]).result().cached_tokens == 16
        engine.check()


def test_steps_that_run_ahead(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of embeddings beside tokens that the host has not heard of, and between captured steps."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    given = [vectors(model, count, seed=count) for count in (1, 17, 30)]
    with small(model, run_ahead=True, num_blocks=60) as engine:
        handles = []
        for embeds, prompt in zip(given, PROMPTS, strict=False):
            handles += [engine.submit(inputs_embeds=embeds, **GREEDY), engine.submit(prompt, **GREEDY)]
            for _ in range(6):
                engine.step()
        found = [answers(handle.result()) for handle in handles]
        assert engine.stats()["graphs"]["replayed"] > 3
    expected = (
        [right(model, each, **GREEDY) for each in given],
        [alone(model, prompt, **GREEDY) for prompt in PROMPTS[:3]],
    )
    assert (found[::2], found[1::2]) == expected


def test_a_tokens_own_embeddings_answer_as_the_token(model: Any) -> None:
    embeds = model.get_input_embeddings()(torch.tensor(PROMPTS[1]))
    with small(model) as engine:
        assert answers(engine.generate([embeds], **GREEDY)[0]) == alone(model, PROMPTS[1], **GREEDY)


def test_prefixes_are_shared_by_content(model: Any) -> None:
    """C18, C24: equal rows are computed once, another tensor with other content never; the ids beside them
    say nothing about that.
    """
    first, other = vectors(model, 30), vectors(model, 30, seed=1)
    mixed = torch.cat([first[:17], other[17:]])
    nearly = first.clone()
    nearly[3, 5] += 1e-6
    with small(model, num_blocks=100, check_hits=True) as engine:
        for embeds, ids, cached in (
            (first, None, 0), (first.clone(), None, 28), (other, None, 0), (mixed, None, 16), (nearly, None, 3),
            (first, PROMPTS[3], 28), (other, PROMPTS[3], 28),
        ):  # fmt: skip
            output = engine.submit(ids, inputs_embeds=embeds, **GREEDY).result()
            assert output.cached_tokens == cached
            assert answers(output) == right(model, embeds, ids, **GREEDY)
        assert engine.submit(PROMPTS[3], **GREEDY).result().cached_tokens == 0
        assert engine.submit(inputs_embeds=first, salt="mine", **GREEDY).result().cached_tokens == 0
        twins = [engine.submit(inputs_embeds=vectors(model, 22, seed=9), **GREEDY) for _ in range(3)]
        assert [handle.result().cached_tokens for handle in twins] == [0, 20, 20]


def test_names(model: Any) -> None:
    """A name belongs to a row's content and to the key."""
    rows = vectors(model, 4)
    names = names_of(rows, b"key")
    assert len(set(names)) == 4
    assert all(-(2**63) <= name < UNKNOWN for name in names)
    assert names_of(rows.flip(0), b"key") == names[::-1]
    assert not set(names_of(rows, b"other")) & set(names)
    assert len(set(names_of(rows.to(torch.bfloat16), b"key"))) == 4


def test_what_the_owner_does_with_the_tensor_later(model: Any) -> None:
    """A request that is computed again has the embeddings it came with; no gradient is kept."""
    embeds = vectors(model, 17).requires_grad_()
    expected = right(model, embeds.detach(), **GREEDY)
    with small(model) as engine:
        handle = engine.submit(inputs_embeds=embeds, **GREEDY)
        engine.step()
        with torch.no_grad():
            embeds.zero_()
        engine.pause()
        engine.resume()
        assert answers(handle.result()) == expected


def test_what_cannot_be_is_refused(model: Any) -> None:
    embeds = vectors(model, 5)
    with small(model) as engine:
        for arguments, error in (
            ({}, "needs a prompt, or inputs_embeds"),
            ({"inputs_embeds": embeds.tolist()}, r"must be a tensor \[tokens, 32\], got list"),
            ({"inputs_embeds": embeds[:, :7]}, r"\[5, 7\], expected \[tokens, 32\]"),
            ({"inputs_embeds": embeds.expand(2, 5, 32)}, "one prompt a request"),
            ({"inputs_embeds": embeds[:0]}, "empty"),
            ({"inputs_embeds": embeds.half()}, "the model computes in torch.float32"),
            ({"inputs_embeds": embeds, "prompt": [5, 6]}, "2 token ids and 5 embeddings"),
            ({"inputs_embeds": embeds, "prompt": embeds}, "give one of them"),
            ({"inputs_embeds": embeds, "max_length": 5}, "leaves none to generate"),
            ({"prompt": [5, 6], "pixel_values": embeds}, r"LlamaForCausalLM takes no \['pixel_values'\]"),
        ):
            with pytest.raises((TypeError, ValueError), match=error):
                engine.submit(**arguments)
        assert engine.stats()["waiting"] == 0
        refused = engine.submit(inputs_embeds=vectors(model, 200), max_new_tokens=50).result()
        assert (refused.finish_reason, "63 blocks" in str(refused.error)) == ("refused", True)


def test_a_model_that_wants_ids() -> None:
    """Found out in the trial: its answers to embeddings are others. Ids are served all the same."""
    model = build(BY_NAME["llama"])
    forward = model.model.forward

    def twice(*arguments: Any, inputs_embeds: Any = None, **keywords: Any) -> Any:
        return forward(
            *arguments, inputs_embeds=None if inputs_embeds is None else 2 * inputs_embeds, **keywords
        )

    model.model.forward = twice
    with small(model) as engine:
        with pytest.raises(ValueError, match="answers its own embeddings differently"):
            engine.submit(inputs_embeds=vectors(model, 5))
        assert answers(engine.generate([PROMPTS[1]], **GREEDY)[0]) == alone(model, PROMPTS[1], **GREEDY)
