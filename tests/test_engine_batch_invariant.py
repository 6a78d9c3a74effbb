"""Engines with batch_invariant=True: the log-probabilities of their tokens have the bits of a trainer's forward."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from cases import once_each
from invariance import (
    ADAPTERS,
    Sampled,
    adapted,
    adapters_numbers,
    compiles,
    engine_numbers,
    model_of,
    prompts,
    trainer_numbers,
)

import hf_paged
from hf_paged import Engine, NotInvariant

pytestmark = compiles

NAMES = ["llama", "gpt2", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "bloom", "mistral"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*once_each(NAMES, [torch.float32, torch.bfloat16]), ("llama", torch.bfloat16)],
    ids=str,
)
def test_the_trainers_bits(name: str, dtype: torch.dtype) -> None:
    """C44: sampled together in chunks with shared prefixes, sampled alone, and trained in a padded batch."""
    model = model_of(name, dtype)
    sequences, together, alone = engine_numbers(model)
    assert together == alone
    for side in ("left", "right"):
        assert trainer_numbers(model, sequences, side) == together


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("qwen3_moe", torch.bfloat16)])
def test_alone_among_64_others_and_in_training(name: str, dtype: torch.dtype) -> None:
    """C44: whole prompts, chunks, preemption, one by one; then forwards of 1, 8 and 64 rows padded on both sides."""
    model = model_of(name, dtype)
    chance = random.Random(2)
    rows = [[chance.randrange(5, 60) for _ in range(chance.randint(2, 30))] for _ in range(65)]

    def submit(engine: Engine, row: int) -> Any:
        way = {"do_sample": True, "seed": row, "logprobs": True}
        return engine.submit(rows[row], max_new_tokens=4, pad_token_id=0, eos_token_id=99, **way)

    def sampled(alone: bool = False, **options: Any) -> tuple[list[Sampled], torch.Tensor]:
        with Engine(model, batch_invariant=True, block_size=4, **options) as engine:
            if alone:
                outputs = [submit(engine, row).result() for row in range(10)]
            else:
                handles = [submit(engine, row) for row in range(len(rows))]
                outputs = [handle.result() for handle in handles]
            assert (engine.stats()["preemptions"] > 0) == (options["num_blocks"] < 800)
        found = [output.sequences[0] for output in outputs]
        sequences = [
            Sampled(len(row), [*row, *each.token_ids]) for row, each in zip(rows, found, strict=False)
        ]
        return sequences, torch.tensor([[token.logprob for token in each.logprobs] for each in found])

    sequences, right = sampled(max_batch_tokens=4096, num_blocks=800)
    for options in (
        {"alone": True, "max_batch_tokens": 4096, "num_blocks": 800},
        {"max_batch_tokens": 70, "max_batch_sequences": 65, "num_blocks": 800},
        {"max_batch_tokens": 200, "num_blocks": 120},
    ):
        again, found = sampled(**options)
        assert again == sequences[: len(again)]
        assert torch.equal(found, right[: len(again)]), options
    for size, count in ((1, 6), (8, 16), (64, 64)):
        for side in ("left", "right"):
            found = torch.cat(
                [
                    torch.tensor(trainer_numbers(model, sequences[first : first + size], side))
                    for first in range(0, count, size)
                ]
            )
            assert torch.equal(found, right[:count]), f"{size} rows padded on the {side}"


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "deepseek_v3", "bloom"])
def test_rows_without_a_flat_form_decode_in_one_forward(name: str) -> None:
    """C44: padded to one length, windows too, with the bits of each alone."""
    model = model_of(name)
    shapes: set[tuple[int, ...]] = set()
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.add(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    rows = [[5 + (7 * row + i) % 50 for i in range(length)] for row, length in enumerate((2, 19, 9, 9))]
    wanted: dict[str, Any] = {"max_new_tokens": 8, "logprobs": True, "pad_token_id": 0, "eos_token_id": 99}
    with Engine(model, batch_invariant=True, block_size=4) as engine:
        assert set(engine.stats()["off"]) >= {"flat"}
        assert "beside" not in engine.stats()["off"]
        handles = [engine.submit(row, do_sample=False, **wanted) for row in rows]
        together = [handle.result().sequences[0].logprobs for handle in handles]
        assert (4, 1) in shapes
        alone = [engine.submit(row, do_sample=False, **wanted).result() for row in rows]
        engine.check()
    assert [each.sequences[0].logprobs for each in alone] == together


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted(preemption: str) -> None:
    """C44: blocks that wait on the host, and tokens that are computed again, change no bit."""
    model = model_of("llama", torch.bfloat16)
    options: dict[str, Any] = {"num_blocks": 14, "preemption": preemption, "host_blocks": None}
    rows = [[5 + row, *range(20, 26)] for row in range(5)]
    wanted = {
        "max_new_tokens": 12,
        "do_sample": False,
        "logprobs": True,
        "pad_token_id": 0,
        "eos_token_id": 99,
    }
    with Engine(model, batch_invariant=True, block_size=4, **options) as engine:
        handles = [engine.submit(row, **wanted) for row in rows]
        outputs = [handle.result() for handle in handles]
        assert engine.stats()["preemptions"] > 0
        for row, output in zip(rows, outputs, strict=True):
            again = engine.submit(row, **wanted).result()
            assert again.sequences[0].logprobs == output.sequences[0].logprobs


def test_seeds_draw_the_same_tokens_in_all_company() -> None:
    """C35: also where two tokens are as likely as each other up to rounding."""
    model = model_of("llama", torch.bfloat16)
    with Engine(model, batch_invariant=True) as engine:

        def submit(seed: int) -> Any:
            return engine.submit(
                prompts(60)[seed % 4],
                max_new_tokens=8,
                do_sample=True,
                seed=seed,
                temperature=1.3,
                pad_token_id=0,
            )

        together = [handle.result().sequences[0].token_ids for handle in [submit(seed) for seed in range(12)]]
        assert [submit(seed).result().sequences[0].token_ids for seed in range(12)] == together


PARAMETERS: list[dict[str, Any]] = [
    {"presence_penalty": 0.9, "frequency_penalty": 0.6},
    {"presence_penalty": 0.9, "logits_processor": [lambda ids, scores: scores]},
    {"prefix_allowed_tokens_fn": lambda row, ids: list(range(5, 50))},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    {"num_beams": 3, "do_sample": True, "seed": 4, "top_k": 20},
    {"num_beams": 2, "do_sample": True, "seed": 5, "frequency_penalty": 0.8, "typical_p": 0.9},
]


def test_parameters_of_requests() -> None:
    """Requests whose parameters compute with scores have the tokens of an ordinary engine, and end no other."""
    answers = []
    for together in (True, False):
        with Engine(model_of("llama", torch.float32), batch_invariant=together) as engine:
            shared = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": 1}
            handles = [
                engine.submit(prompts(60)[place % 4], **{"do_sample": False, **shared, **options})
                for place, options in enumerate([*PARAMETERS, {}])
            ]
            outputs = [handle.result() for handle in handles]
        assert [output.error for output in outputs] == [None] * len(outputs)
        answers.append([output.sequences[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


@compiles
@pytest.mark.parametrize("beams", [1, 2])
def test_equal_top_logprobs_come_in_one_order(beams: int) -> None:
    """However many top tokens a request beside it asks for."""
    model = model_of("llama")
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight[10].clone().expand_as(model.lm_head.weight))
    options = {"max_new_tokens": 2, "do_sample": False, "num_beams": beams, "logprobs": 3}
    with Engine(model, batch_invariant=True) as engine:

        def top_logprobs(handle: Any) -> list[Any]:
            return [each.top_logprobs for each in handle.result().sequences[0].logprobs]

        alone = [top_logprobs(engine.submit([5, 6, 7 + i], **options)) for i in range(3)]
        handles = [engine.submit([5, 6, 7 + i], **options) for i in range(3)]
        engine.submit([50, 51], **{**options, "logprobs": 20})
        assert [top_logprobs(handle) for handle in handles] == alone
    assert [token for token, _ in alone[0][0]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        *once_each(["qwen3", "gpt2"], [torch.bfloat16, torch.float16]),
    ],
    ids=str,
)
def test_adapters(name: str, dtype: torch.dtype) -> None:
    """C44: rows of one adapter, of several and of none in one batch, in float32 and in the model's type, have the
    bits that they have alone and those of peft's own forward.
    """
    model = adapted(model_of(name, dtype))
    sequences, together, alone = engine_numbers(model, adapters=ADAPTERS)
    assert together == alone
    assert adapters_numbers(model, sequences, ADAPTERS, "left") == together


def test_adapters_that_the_engine_is_given() -> None:
    """C44: weights on the host, of ranks that are filled up for kernels."""
    given = adapted(model_of("llama", torch.bfloat16))
    sequences, together, alone = engine_numbers(
        model_of("llama", torch.bfloat16), adapters=ADAPTERS, given=given
    )
    assert together == alone == adapters_numbers(given, sequences, ADAPTERS, "right")


def test_another_thread_drives_it() -> None:
    """C44: asyncio.to_thread copies the block's context, and torch's modes stay behind."""
    model = model_of("llama", torch.bfloat16)
    rows = prompts(60)[:3]

    def work() -> list[Any]:
        outputs = engine.generate(rows, max_new_tokens=4, do_sample=False, logprobs=True, pad_token_id=0)
        return [output.sequences[0].logprobs for output in outputs]

    async def apart() -> list[Any]:
        with hf_paged.batch_invariant():
            return await asyncio.to_thread(work)

    with Engine(model, batch_invariant=True) as engine:
        right = work()
        assert asyncio.run(apart()) == right


def test_check_mismatch_finds_nothing() -> None:
    """C44: the check that users run reports a largest difference of zero."""
    model = model_of("llama", torch.bfloat16)
    rows = prompts(60)[1:2]
    with Engine(model, batch_invariant=True) as engine:
        (output,) = engine.generate(
            rows, num_return_sequences=4, do_sample=True, max_new_tokens=8, logprobs=True, pad_token_id=0
        )
    with hf_paged.batch_invariant():
        report = hf_paged.check_mismatch(
            model,
            torch.tensor(rows),
            completions=[each.token_ids for each in output.sequences],
            logprobs=[[token.logprob for token in each.logprobs] for each in output.sequences],
        )
    assert report.logprobs.largest == 0
    assert report.verdict == "identical"


def test_refused_models() -> None:
    """Positions that depend on the length of the whole, and attention of other kinds."""
    for dtype in (torch.float32, torch.bfloat16):  # one trial may show no difference
        with pytest.raises(NotInvariant, match="MptForCausalLM adds biases relative to the last token"):
            Engine(model_of("mpt", dtype), batch_invariant=True)
    Engine(model_of("mpt")).close()
    model = model_of("llama")
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(NotInvariant, match="LlamaForCausalLM has 'flex_attention'; call"):
        Engine(model, batch_invariant=True)
    with pytest.raises(TypeError, match="batch_invariant must be True or False, got 1"):
        Engine(model_of("llama"), batch_invariant=1)  # type: ignore[arg-type]  # the point
