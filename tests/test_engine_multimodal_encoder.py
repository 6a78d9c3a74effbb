"""Encoder-decoders in the engine: one cross table a request, whoever shares it, and the tokens of generate()
(C11, C23, C35, C36).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from cases import once_each
from computed_once import computed_once
from engine_answers import PROMPTS, SCORED, answers, checked_answers, new_tokens_of, small_engine
from engine_steps import job_of
from engine_ways import GREEDY
from engine_ways import WAYS as OF_DECODERS
from families import BY_NAME, TOKENS, VOCABULARY, build
from transformers import GenerationMixin

import hf_paged

WAYS: dict[str, dict[str, Any]] = {
    **OF_DECODERS,
    "processed": {
        **GREEDY,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "encoder_no_repeat_ngram_size": 2,
        "forced_bos_token_id": 7,
    },
}
PADDED = [0, 0, *PROMPTS[1]]
"""Of an encoder's prompt stock does not take the model's padding for padding."""


@functools.cache
def text_model(name: str) -> Any:
    return build(BY_NAME[name])


@functools.cache
def whisper() -> Any:
    """A tiny one that hears recordings of 40 frames."""
    torch.manual_seed(0)
    config = tf.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, vocab_size=VOCABULARY, num_mel_bins=8, max_source_positions=20, max_target_positions=64,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None, **TOKENS,
    )  # fmt: skip
    model = tf.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
    return model


def recording(seed: int) -> torch.Tensor:
    return torch.randn(1, 8, 40, generator=torch.Generator().manual_seed(seed))


def right(model: Any, *inputs: Any, begin: list[int] | None = None, **options: Any) -> list[list[int]]:
    """The new tokens of generate() on this input alone; Whisper's own generate() does more."""
    given = {} if begin is None else {"decoder_input_ids": torch.tensor([begin])}
    ids = [torch.tensor([each]) if isinstance(each, list) else each for each in inputs]

    def compute() -> list[list[int]]:
        answer = GenerationMixin.generate(model, *ids, **given, **SCORED, **options)
        return new_tokens_of(answer, len(begin or [0]))

    return computed_once(compute, model, ids, begin, options)


small = functools.partial(small_engine, num_blocks=40)


@pytest.mark.parametrize(("name", "way"), [*once_each(["t5", "bart"], [*WAYS]), ("t5", "processed")])
def test_text(name: str, way: str) -> None:
    """Beside others, and computed again."""
    model, options = text_model(name), WAYS[way]
    prompts = [*PROMPTS[:4], PADDED]
    with small(model) as engine:
        handles = [engine.submit(prompt, **options) for prompt in prompts]
        for _ in range(4):
            engine.step()
        engine.pause()
        engine.resume()
        assert checked_answers(engine, handles) == [right(model, prompt, **options) for prompt in prompts]
        assert [handle.result().prompt_token_ids for handle in handles] == prompts
        assert engine.stats()["form"] == "rows"
        assert engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_recordings(way: str) -> None:
    model, options = whisper(), WAYS[way]
    with small(model) as engine:
        handles = [engine.submit(input_features=recording(i), **options) for i in range(3)]
        handles.append(
            engine.submit(input_features=recording(3)[0], decoder_input_ids=[1, 20, 30], **options)
        )
        expected = [right(model, recording(i), **options) for i in range(3)]
        expected.append(right(model, recording(3), begin=[1, 20, 30], **options))
        assert checked_answers(engine, handles) == expected
        assert handles[0].result().prompt_token_ids == []
        for arguments, error in (
            ({"prompt": [5, 6]}, "takes no text prompt; give input_features"),
            ({"input_features": recording(0)[:, :, :30]}, r"\[1, 8, 30\], expected \[1, 8, 40\]"),
            ({"input_features": [1.0]}, "give input_features"),
        ):
            with pytest.raises(ValueError, match=error):
                engine.submit(**arguments)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_what_the_decoder_begins_with(name: str) -> None:
    """In chunks, and behind the model's own first token as in generate()."""
    model = text_model(name)
    first = model.config.decoder_start_token_id
    begin = [first, *PROMPTS[1]]
    with small(model, max_batch_tokens=7) as engine:
        handles = [
            engine.submit(PROMPTS[2], decoder_input_ids=each, **GREEDY)
            for each in (begin, begin[1:], torch.tensor([begin]))
        ]
        assert checked_answers(engine, handles) == [right(model, PROMPTS[2], begin=begin, **GREEDY)] * 3


def test_draws() -> None:
    """C35: samples draw the same in a crowd, computed again, and alone."""
    model = text_model("bart")
    options = {
        "do_sample": True,
        "num_return_sequences": 3,
        "temperature": 1.4,
        "seed": 5,
        "max_new_tokens": 9,
    }
    with small(model, num_blocks=200) as engine:
        expected = answers(engine.submit(PROMPTS[3], **options).result())
        assert len({tuple(row) for row in expected}) > 1
        crowd = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
        handle = engine.submit(PROMPTS[3], **options)
        for _ in range(6):
            engine.step()
        engine.pause()
        engine.resume()
        assert checked_answers(engine, [handle, *crowd]) == [
            expected,
            *(right(model, prompt, **GREEDY) for prompt in PROMPTS),
        ]


def test_one_cross_table_a_request() -> None:
    """C36: as long as the encoder's answer, shared by all beams or samples, there with the first step, gone
    with the group.
    """
    model = text_model("t5")
    with small(model, num_blocks=60) as engine:
        assert engine.stats()["blocks"]["cross"]["total"] == 60
        handle = engine.submit(PROMPTS[3], num_beams=4, max_new_tokens=9, min_new_tokens=9)
        assert engine.stats()["blocks"]["cross"]["held"] == 0
        for _ in range(5):
            engine.step()
            assert engine.stats()["blocks"]["cross"]["held"] == -(-len(PROMPTS[3]) // 4)
        other = engine.submit(
            PROMPTS[1], num_return_sequences=2, do_sample=True, max_new_tokens=9, min_new_tokens=9
        )
        engine.step()
        assert engine.stats()["blocks"]["cross"]["held"] == 8 + 5
        handle.cancel()
        assert engine.stats()["blocks"]["cross"]["held"] == 5
        engine.pause()
        assert engine.stats()["blocks"]["cross"]["held"] == 0
        engine.resume()
        checked_answers(engine, [other])


def test_the_encoder_runs_once_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a request with all its beams and steps, and once more when it is computed again."""
    model = text_model("bart")
    encoder, ran = model.get_encoder(), []
    forward = encoder.forward
    with small(model, num_blocks=60) as engine:
        monkeypatch.setattr(
            encoder,
            "forward",
            lambda *args, **kwargs: ran.append(kwargs["input_ids"].shape[1]) or forward(*args, **kwargs),
        )
        handles = [
            engine.submit(prompt, num_beams=2, decoder_input_ids=PROMPTS[1], **GREEDY)
            for prompt in PROMPTS[:2]
        ]
        for _ in range(7):
            engine.step()
        assert sorted(ran) == [3, 17]
        engine.pause()
        engine.resume()
        checked_answers(engine, handles)
        assert sorted(ran) == [3, 3, 17, 17]
        assert all(job_of(handle).params.source.made is None for handle in handles)


def test_room_for_cross_tables() -> None:
    """C11, C12: what an encoder makes counts; who finds no room waits, who never will is refused with both
    numbers.
    """
    model = text_model("t5")
    source = [5 + i % 60 for i in range(60)]
    with small(model, num_blocks=40) as engine:
        refused = engine.submit([5] * 161, **GREEDY).result()
        assert refused.finish_reason == "refused"
        assert "161 tokens needs 41 blocks of 4 tokens and 40 can be had" in str(refused.error)
        handles = [engine.submit(source[i:], **GREEDY) for i in range(4)]
        engine.step()
        assert engine.stats()["running"] == 2  # 15 blocks each
        assert checked_answers(engine, handles) == [right(model, source[i:], **GREEDY) for i in range(4)]
    with small(text_model("bart")) as engine:
        assert "made for 256 tokens, got 300" in str(engine.submit([5] * 300, **GREEDY).result().error)


@pytest.mark.parametrize(("name", "preemption"), once_each(["t5", "bart"], ["swap", "recompute"]))
def test_few_blocks(name: str, preemption: str) -> None:
    """C30, C36: cross tables are swapped with their groups and come back as they were, or are made again."""
    model = text_model(name)
    options = {"max_new_tokens": 20, "min_new_tokens": 20}
    with small(model, num_blocks=24, block_size=2, preemption=preemption) as engine:
        handles = [engine.submit(prompt, num_beams=2, **options) for prompt in (PROMPTS[2], PROMPTS[0])]
        handles += [engine.submit(prompt, do_sample=False, **options) for prompt in PROMPTS[:3]]
        found = checked_answers(engine, handles)
        stats = engine.stats()
        assert stats["preemptions"] > 0
        assert (stats["swapped_in"] > 0) == (preemption == "swap")
    assert found[:2] == [right(model, prompt, num_beams=2, **options) for prompt in (PROMPTS[2], PROMPTS[0])]
    assert found[2:] == [right(model, prompt, do_sample=False, **options) for prompt in PROMPTS[:3]]


def test_a_failure_is_the_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """C34: an encoder that raises ends its request; one that makes another number of tokens than it said,
    too.
    """
    model = text_model("t5")
    forward = model.get_encoder().forward

    def choke(*arguments: Any, **keywords: Any) -> Any:
        ids = keywords["input_ids"]
        if (ids == 93).any():
            raise ValueError("indigestible")
        if (ids == 94).any():
            keywords["input_ids"] = ids[:, 1:]
        return forward(*arguments, **keywords)

    with small(model) as engine:
        monkeypatch.setattr(model.get_encoder(), "forward", choke)
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:2]]
        bad = [engine.submit([5, 93, 6], **GREEDY), engine.submit([5, 94, 6], num_beams=2, **GREEDY)]
        assert "indigestible" in str(bad[0].result().error)
        assert "made 2 tokens, expected 3" in str(bad[1].result().error)
        assert checked_answers(engine, handles) == [right(model, prompt, **GREEDY) for prompt in PROMPTS[:2]]


def test_what_cannot_be_is_refused() -> None:
    model = text_model("t5")
    with small(model) as engine:
        for arguments, error in (
            ({}, "needs a prompt"),
            ({"inputs_embeds": torch.zeros(3, 32)}, "the engine takes its prompt as input_ids only"),
            ({"input_features": torch.zeros(1, 3, 32)}, "the engine takes its prompt as input_ids only"),
            ({"prompt": [5, 6], "decoder_input_ids": [0, 5, 6], "max_length": 3}, "leaves none to generate"),
            ({"prompt": [5, 6], "encoder_outputs": 1}, "does not take"),
        ):
            with pytest.raises(ValueError, match=error):
                engine.submit(**arguments)
    with small(build(BY_NAME["llama"])) as engine, pytest.raises(ValueError, match="decoder_input_ids"):
        engine.submit([5, 6], decoder_input_ids=[5])


def test_a_trace_and_a_thread(tmp_path: Path) -> None:
    """The cross tables are in the record as one more kind of layer."""
    model = text_model("bart")
    with small(model) as engine:
        with engine.trace(tmp_path / "a.jsonl"):
            engine.start()
            handles = [engine.submit(prompt, num_beams=2, **GREEDY) for prompt in PROMPTS[:4]]
            found = [answers(handle.result(120)) for handle in handles]
            engine.stop()
        assert found == [right(model, prompt, num_beams=2, **GREEDY) for prompt in PROMPTS[:4]]
    trace = hf_paged.trace.read(tmp_path / "a.jsonl")
    assert [kind.name for kind in trace.kinds] == ["full", "cross"]
    for block_map in trace.maps():
        for name, tables in block_map.tables.items():
            assert len(tables[1].blocks) == -(-len(PROMPTS[name.request]) // 4)
        assert block_map.step.blocks[1].cached == 0
    assert trace.steps[-1].blocks[1].held > 0
