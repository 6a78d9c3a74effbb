"""prompt_logprobs: what the model finds of a prompt's tokens, as one forward over the prompt says it, however the
prompt was computed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from adapters import adapted, lora
from cases import every_other
from families import BY_NAME, VOCABULARY, build

from hf_paged.engine import Engine
from hf_paged.engine.sampling import scores

BOUND = 2e-4
"""Of differences of logprobs in float32."""
OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 120,
    "max_batch_sequences": 8,
    "max_batch_tokens": 64,
}
NEW: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}


def tokens(count: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(5, VOCABULARY) for _ in range(count)]


def assert_right(model: Any, output: Any, top_logprobs: int) -> None:
    assert output.error is None
    prompt = output.prompt_token_ids
    with torch.no_grad():
        right = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    first, *notes = output.prompt_logprobs
    assert first is None
    assert [note.token_id for note in notes] == prompt[1:]
    own = right.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0] if notes else torch.empty(0)
    torch.testing.assert_close(torch.tensor([n.logprob for n in notes]), own, atol=BOUND, rtol=0)
    best = right.topk(top_logprobs).values.tolist()
    for note, values in zip(notes, best, strict=True):
        assert [value for _, value in note.top_logprobs] == pytest.approx(values, abs=BOUND)
        assert all(
            abs(right[notes.index(note), token] - value) <= BOUND for token, value in note.top_logprobs
        )


@pytest.fixture(scope="module")
def llama() -> Any:
    return build(BY_NAME["llama"])


@pytest.fixture
def engine(llama: Any) -> Iterator[Engine]:
    with Engine(llama, **OPTIONS) as made:
        yield made
        made.check()


@pytest.mark.parametrize(
    ("more", "name"),
    every_other(
        [{}, {"max_batch_tokens": 9, "max_batch_sequences": 3}, {"run_ahead": True, "max_batch_tokens": 9}],
        ["llama", "gemma3", "gpt2", "falcon"],
    ),
)
def test_prompts_whole_and_in_chunks(name: str, more: dict[str, Any]) -> None:
    """Flat rows, sliding windows, and sequences one by one; lengths around those of blocks and chunks."""
    model = build(BY_NAME[name])
    with Engine(model, **{**OPTIONS, **more}) as engine:
        handles = [
            engine.submit(tokens(count, count), prompt_logprobs=i % 3, **NEW)
            for i, count in enumerate((1, 2, 4, 5, 8, 9, 10, 31))
        ]
        for i, handle in enumerate(handles):
            assert_right(model, handle.result(), i % 3)
        engine.check()


def test_prefixes_are_shared_with_their_scores(llama: Any, engine: Engine) -> None:
    """C18, C23: what is computed of prompts that begin alike is computed once, in requests at once and behind each
    other, and each gets all its scores.
    """
    common = tokens(30)
    ends = [tokens(7, seed) for seed in range(1, 5)]
    for _ in range(2):
        handles = [engine.submit(common + end, prompt_logprobs=1, **NEW) for end in ends]
        outputs = [handle.result() for handle in handles]
        for output in outputs:
            assert_right(llama, output, 1)
        assert all(output.cached_tokens >= 27 for output in outputs[1:])
    assert engine.stats()["tokens"] < 2 * len(common) + 8 * (len(ends[0]) + 8)


def test_blocks_without_scores_are_computed_again(llama: Any, engine: Engine) -> None:
    """Cached keys and values say nothing of logprobs: those of other requests are of no use, nor are too few
    top tokens.
    """
    prompt = tokens(40)
    engine.submit(prompt, **NEW).result()
    for top_logprobs, cached in ((1, 0), (1, 39), (5, 0), (2, 39)):
        output = engine.submit(prompt, prompt_logprobs=top_logprobs, **NEW).result()
        assert_right(llama, output, top_logprobs)
        assert output.cached_tokens == cached
    assert engine.submit(prompt, **NEW).result().cached_tokens == 39


def test_scores_go_with_their_blocks(llama: Any, engine: Engine) -> None:
    """Evicted blocks take their scores along: a block of the same name that came later has none."""
    prompt = tokens(40)
    assert_right(llama, engine.submit(prompt, prompt_logprobs=1, **NEW).result(), 1)
    for seed in range(1, 9):
        engine.submit(tokens(100, seed), **NEW).result()
    engine.submit(prompt, **NEW).result()
    output = engine.submit(prompt, prompt_logprobs=1, **NEW).result()
    assert_right(llama, output, 1)
    assert output.cached_tokens == 0


def test_scores_do_not_outlive_weights() -> None:
    """C24: after a change of the model nothing of the old scores is found."""
    model = build(BY_NAME["llama"])
    prompt = tokens(40)
    with Engine(model, **OPTIONS) as engine:
        before = engine.submit(prompt, prompt_logprobs=1, **NEW).result()
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        after = engine.submit(prompt, prompt_logprobs=1, **NEW).result()
        assert_right(model, after, 1)
        assert after.prompt_logprobs != before.prompt_logprobs
        engine.check()


def test_salts_do_not_share_scores(llama: Any, engine: Engine) -> None:
    prompt = tokens(40)
    for salt in ("a", "b"):
        output = engine.submit(prompt, prompt_logprobs=1, salt=salt, **NEW).result()
        assert output.cached_tokens == 0
        assert_right(llama, output, 1)


def test_preempted_requests_have_all_scores(llama: Any) -> None:
    """C29: in a pool that is too small for all, by recomputation and by swap."""
    for preemption in ("recompute", "swap"):
        options = {**OPTIONS, "num_blocks": 24, "max_batch_tokens": 16, "admission": "watermark"}
        with Engine(llama, **options, preemption=preemption) as engine:
            long = {"max_new_tokens": 30, "do_sample": False}
            handles = [engine.submit(tokens(25, seed), prompt_logprobs=1, **long) for seed in range(4)]
            outputs = [handle.result() for handle in handles]
            for output in outputs:
                assert_right(llama, output, 1)
            assert sum(output.preemptions for output in outputs)
            engine.check()


@pytest.mark.parametrize("ahead", [False, True])
def test_with_samples_beams_and_processors(llama: Any, ahead: bool) -> None:
    """Requests that need the host for their tokens end with all their scores, too; and so do logprobs of answers."""
    ways: list[dict[str, Any]] = [
        {"num_beams": 3, "max_new_tokens": 1},
        {"do_sample": True, "seed": 1, "num_return_sequences": 3, "max_new_tokens": 2},
        {"logits_processor": [lambda ids, values: values], "max_new_tokens": 1},
        {"logprobs": 2, "max_new_tokens": 3},
        {"max_new_tokens": 4},
    ]
    with Engine(llama, **OPTIONS, run_ahead=ahead) as engine:
        for seed, way in enumerate(ways):
            prompt = tokens(20, seed)
            want = engine.submit(prompt, **{"do_sample": False, **way}).result()
            found = engine.submit(prompt, prompt_logprobs=2, **{"do_sample": False, **way}).result()
            assert_right(llama, found, 2)
            assert [each.token_ids for each in found.sequences] == [each.token_ids for each in want.sequences]
        engine.check()


def test_long_prompts_are_scored_in_slices(
    llama: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "SLICE", 7)
    assert_right(llama, engine.submit(tokens(50), prompt_logprobs=3, **NEW).result(), 3)


def test_scores_are_there_before_the_first_token(llama: Any, engine: Engine) -> None:
    handle = engine.submit(tokens(30), prompt_logprobs=1, **NEW)
    assert handle.prompt_logprobs is None
    for _ in handle:
        assert handle.prompt_logprobs is not None
    assert handle.prompt_logprobs == handle.result().prompt_logprobs
    assert engine.submit(tokens(30), **NEW).result().prompt_logprobs is None


def test_prompts_that_are_no_ids_are_refused(llama: Any, engine: Engine) -> None:
    embeds = torch.zeros(4, llama.config.hidden_size)
    with pytest.raises(ValueError, match="prompt_logprobs=1 needs a prompt of token ids"):
        engine.submit(inputs_embeds=embeds, prompt_logprobs=1)
    with pytest.raises(ValueError, match="prompt_logprobs='x' is not True or a number"):
        engine.submit([5, 6], prompt_logprobs="x")


def test_adapters_score_by_their_own_weights() -> None:
    """Requests of several adapters in one step, also on the head, and equal prompts that share nothing."""
    model = adapted(lora(), lora(r=3, target_modules=["q_proj", "lm_head"]))
    prompt = tokens(30)
    with Engine(model, **OPTIONS) as engine:
        handles = {
            name: engine.submit(prompt, adapter=name, prompt_logprobs=1, **NEW) for name in ("one", "two")
        }
        for name, handle in handles.items():
            model.set_adapter(name)
            assert_right(model, handle.result(), 1)
        engine.check()
