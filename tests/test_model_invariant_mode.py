"""Batch-invariant arithmetic: torch's answers up to rounding, the same bits in all company, refusals by name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from contextvars import Context, copy_context
from typing import Any

import pytest
import torch
from cases import every_other
from families import BY_NAME, build
from invariance import compiles, model_of
from modes import MODES
from processes import LIMIT
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

import hf_paged
from hf_paged import NotInvariant, batch_invariant
from hf_paged.kv.reference import invariant
from hf_paged.model.thread_state import mode_depths

pytestmark = compiles

FORWARDS = ["llama", "gpt2", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "bloom"]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = numbers(5, 7, 12)


def test_the_mode_ends_with_its_block() -> None:
    """Also where it is entered twice, and where an error ends it. Other threads compute as before."""
    x, w = numbers(3, 300), numbers(7, 300)
    ordinary = F.linear(x, w)
    with pytest.raises(KeyError), batch_invariant():
        raise KeyError
    with batch_invariant():
        with batch_invariant():
            own = F.linear(x, w)
        assert torch.equal(F.linear(x, w), own)
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(F.conv1d(X, numbers(4, 7, 3))))
        thread.start()
        thread.join()
        assert len(found) == 1
    assert torch.equal(F.linear(x, w), ordinary)


def test_a_model_that_is_loaded_in_the_block(tmp_path: Any) -> None:
    """Its modules have no numbers at first. TRL makes the reference of `beta` so, from the model's folder."""
    model = build(BY_NAME["llama"])
    model.save_pretrained(tmp_path)
    ids = torch.arange(3, 12)[None]
    with batch_invariant(), torch.no_grad():
        loaded = type(model).from_pretrained(tmp_path).eval()
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        shape = F.silu(F.conv1d(X.to("meta"), numbers(4, 7, 3).to("meta"))).shape
    assert shape == F.conv1d(X, numbers(4, 7, 3)).shape


def test_one_object_may_be_entered_again() -> None:
    """C44: its last block ends the mode, not an inner one."""
    mode = batch_invariant()
    depths = mode_depths()
    with mode:
        with mode:
            pass
        assert invariant.get()
    assert not invariant.get()
    assert mode_depths() == depths


def test_one_object_in_two_threads() -> None:
    """C44: each leaves its own blocks, which other modes of one's own may be around."""

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    mode = batch_invariant()
    entered, left = threading.Event(), threading.Event()
    found: list[Any] = []

    def work() -> None:
        with mode:
            entered.set()
            left.wait(LIMIT)
            found.append(invariant.get())
        found.extend((invariant.get(), mode_depths()))

    thread = threading.Thread(target=work)
    with Passing():
        with mode:
            thread.start()
            entered.wait(LIMIT)
        assert (invariant.get(), mode_depths()) == (False, (0, 1))
    left.set()
    thread.join()
    assert found == [True, False, (0, 0)]


def test_threads_that_copy_the_context() -> None:
    """C44: asyncio.to_thread takes it along, and torch's modes stay behind. A thread is in the mode if it enters it."""
    x, w = numbers(3, 300), numbers(70, 300)

    def layer(context: Any) -> tuple[torch.Tensor, bool]:
        with context:
            return F.linear(x, w), invariant.get()

    async def apart(context: Any) -> Any:
        return await asyncio.to_thread(layer, context)

    right = layer(batch_invariant())
    stock = layer(nullcontext())
    assert not torch.equal(right[0], stock[0])
    with batch_invariant():
        for context, (answer, on) in ((batch_invariant(), right), (nullcontext(), stock)):
            found = asyncio.run(apart(context))
            assert torch.equal(found[0], answer)
            assert found[1] == on
    assert mode_depths() == (0, 0)


def test_tasks_that_outlive_a_block() -> None:
    """C44: their context is still that of the block. One that is in a block of its own is told, one that enters
    another block later is in the mode.
    """
    x, w = numbers(3, 300), numbers(70, 300)
    with batch_invariant():
        right = F.linear(x, w)

    async def waits_in_a_block(go: asyncio.Event) -> None:
        with batch_invariant():
            await go.wait()

    async def enters_later(go: asyncio.Event) -> torch.Tensor:
        await go.wait()
        assert not invariant.get()
        with batch_invariant():
            return F.linear(x, w)

    async def limited() -> list[Any]:
        go = asyncio.Event()
        with batch_invariant():
            tasks = [asyncio.create_task(each(go)) for each in (waits_in_a_block, enters_later)]
            await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    told, found = asyncio.run(limited())
    assert isinstance(told, NotInvariant)
    assert torch.equal(found, right)
    assert mode_depths() == (0, 0)


@pytest.mark.parametrize("frozen", [False, True])
def test_logits_to_keep(frozen: bool) -> None:
    """C44: the last logits alone, of one row and of several, those of a base model below adapters too."""
    model = model_of("llama").requires_grad_(not frozen)
    ids = torch.stack([row[:5] for row in rows()])
    with batch_invariant():
        whole = model(ids).logits[:, -2:]
        for keep in (1, 2):
            assert torch.equal(model(ids, logits_to_keep=keep).logits, whole[:, -keep:])
            for i in range(len(ids)):
                kept = model(ids[i : i + 1], logits_to_keep=keep).logits
                assert torch.equal(kept, whole[i : i + 1, -keep:])


def test_tasks_that_leave_in_another_order_are_told() -> None:
    """They share the modes of their thread: what is left of a block would be computed without them."""

    async def inside(mine: asyncio.Event, others: asyncio.Event) -> None:
        with batch_invariant():
            mine.set()
            await others.wait()

    async def limited() -> list[Any]:
        first, second, last = asyncio.Event(), asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(each) for each in (inside(first, second), inside(second, last))]
        await tasks[0]
        last.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    depths = mode_depths()
    left, stayed = asyncio.run(limited())
    assert left is None
    assert isinstance(stayed, NotInvariant)
    assert "another task or generator of this thread left" in str(stayed)
    assert mode_depths() == depths


def test_a_generator_that_ends_within_a_block_is_told() -> None:
    """Its block began first, so the other one has entered nothing."""

    def generator() -> Iterator[None]:
        with batch_invariant():
            yield

    depths = mode_depths()
    outer = generator()
    next(outer)
    with pytest.raises(NotInvariant, match="generator of this thread left"), batch_invariant():
        outer.close()
    assert mode_depths() == depths


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from hf_paged.kv.ops import invariant_kernels

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    invariant_kernels.cache_clear()
    with (
        pytest.raises(ValueError, match=r"needs the C\+\+ ops: there is no C\+\+ compiler"),
        batch_invariant(),
    ):
        pass
    invariant_kernels.cache_clear()


# ---- models


def rows() -> list[torch.Tensor]:
    """Prompts of several lengths."""
    return [(numbers(length, seed=length) * 30).long().abs() % 70 + 5 for length in (5, 23, 14)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORWARDS)
def test_a_row_in_all_company(name: str, dtype: torch.dtype) -> None:
    """C44: a sequence alone, padded on either side, and in pieces over a cache: the same bits."""
    model = model_of(name, dtype)
    prompts = rows()
    width = max(map(len, prompts))
    with batch_invariant(), torch.no_grad():
        alone = [model(row[None]).logits[0] for row in prompts]
        for side in ("left", "right"):
            ids = torch.zeros(len(prompts), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            places = [
                slice(width - len(row), width) if side == "left" else slice(len(row)) for row in prompts
            ]
            for i, (place, row) in enumerate(zip(places, prompts, strict=True)):
                ids[i, place] = row
                mask[i, place] = 1
            positions = {} if name == "bloom" else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
            padded = model(ids, attention_mask=mask, **positions).logits
            for i, place in enumerate(places):
                assert torch.equal(padded[i, place], alone[i])
        cache = None
        pieces = []
        for piece in prompts[1][None].split(9, 1):
            answer = model(piece, past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            pieces.append(answer.logits[0])
        assert torch.equal(torch.cat(pieces), alone[1])


def test_without_the_mode_bits_differ() -> None:
    """The outputs that the tests above compare are not the same by themselves."""
    model = model_of("llama")
    prompt = rows()[1][None]
    with torch.no_grad():
        whole = model(prompt).logits[0]
        cache = None
        pieces = []
        for piece in prompt.split(1, 1):
            answer = model(piece, past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            pieces.append(answer.logits[0])
    assert not torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize(
    ("name", "mode"), every_other(["llama", "gpt_oss"], ["greedy-padded", "sample", "beams", "assisted"])
)
def test_modes_of_generate(name: str, mode: str) -> None:
    """C1: paged and stock generate() give the same scores to the bit."""
    model = model_of(name)
    model.assistant = model_of(name)
    ids = torch.stack([row[:5] for row in rows()])
    arguments = {"input_ids": ids, "pad_token_id": 0, **MODES[mode](model, ids)}
    arguments |= {"return_dict_in_generate": True, "output_scores": True}
    answers = []
    for word in ({}, {"cache_implementation": "paged"}):
        torch.manual_seed(3)
        with batch_invariant():
            answers.append(model.generate(**arguments, **word))
    stock, paged = answers
    assert torch.equal(stock.sequences, paged.sequences)
    for one, two in zip(stock.scores, paged.scores, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("word", [{}, {"cache_implementation": "paged"}])
def test_generate_of_what_rounds_otherwise_in_pieces(word: dict[str, str]) -> None:
    """MPT's biases are relative to the last token: one by one, tokens have other bits than together."""
    model = model_of("mpt")
    options = {"max_new_tokens": 3, "pad_token_id": 0, "do_sample": False, **word}
    with batch_invariant():
        model(rows()[0][None, :5], use_cache=False)
        with pytest.raises(NotInvariant, match="MptForCausalLM adds biases relative to the last token"):
            model.generate(rows()[0][None, :5], **options)
    model.generate(rows()[0][None, :5], **options)


def test_a_prefix_of_ordinary_bits_is_not_reused() -> None:
    """C24: blocks that were computed outside the mode are not found inside it, and the reverse."""
    model = model_of("llama", torch.bfloat16)
    prompt = rows()[1][None].repeat(1, 2)
    arguments = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "cache_implementation": "paged"}
    arguments["cache_config"] = {"prefix_caching": True}
    model.generate(prompt, **arguments)
    model.generate(prompt, **arguments)
    before = hf_paged.stats(model).reused
    assert before > 0
    with batch_invariant():
        answer = model.generate(prompt, output_logits=True, return_dict_in_generate=True, **arguments)
        right = model(answer.sequences).logits[0, prompt.shape[1] - 1]
    assert hf_paged.stats(model).reused == before
    assert torch.equal(answer.logits[0][0], right.float())


@pytest.mark.parametrize("foreach", [False, True])
def test_training(foreach: bool) -> None:
    """Steps of an optimizer in the mode are those without it, up to rounding."""
    ids = rows()[1][None]
    found = []
    for context in (batch_invariant, nullcontext):
        model = model_of("llama").train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
        with context():
            for _ in range(3):
                loss = model(ids, labels=ids).loss
                loss.backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        found.append(loss.item())
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "gpt_oss"])
def test_gradients(name: str) -> None:
    """C44: a training step in the mode has the gradients of one without it, up to rounding."""
    model = model_of(name).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ids = rows()[1][None]
    found = []
    for context in (batch_invariant, nullcontext):
        model.zero_grad()
        with context():
            model(ids, labels=ids).loss.backward()
        found.append([None if each.grad is None else each.grad.clone() for each in model.parameters()])
    for one, two in zip(*found, strict=True):
        assert (one is None) == (two is None)
        assert one is None or torch.allclose(one, two, atol=2e-5 * float(two.abs().max()) + 1e-8)


def test_gradients_of_attention_with_a_learned_bias() -> None:
    """C44: a float mask that learns has its gradient, too."""
    given = [
        numbers(2, 4, 7, 8),
        numbers(2, 2, 9, 8, seed=1),
        numbers(2, 2, 9, 8, seed=2),
        numbers(1, 4, 7, 9),
    ]
    found = []
    for context in (batch_invariant, nullcontext):
        query, key, value, bias = (each.clone().requires_grad_() for each in given)
        with context():
            F.scaled_dot_product_attention(
                query, key, value, attn_mask=bias, enable_gqa=True
            ).square().sum().backward()
        found.append([each.grad for each in (query, key, value, bias)])
    for one, two in zip(*found, strict=True):
        assert torch.allclose(one, two, atol=1e-4)


def test_products_of_two_types_are_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"Invalid dtype of w: expected torch\.float32, got torch\.bfloat16"),
        batch_invariant(),
    ):
        F.linear(X, numbers(9, 12).bfloat16())


def test_autocast() -> None:
    """C44: half-precision products of a float32 model, attention's among them."""
    model = model_of("llama").train()
    prompts = rows()
    width = max(map(len, prompts))
    ids = torch.stack([F.pad(row, (0, width - len(row))) for row in prompts])
    with torch.autocast("cpu", torch.bfloat16):
        ordinary = model(ids).logits
        with batch_invariant():
            found = model(ids).logits
            alone = [model(row[None]).logits[0] for row in prompts]
    assert found.dtype == ordinary.dtype == torch.bfloat16
    assert torch.allclose(found.float(), ordinary.float(), atol=0.05)
    for one, several in zip(alone, found, strict=True):
        assert torch.equal(one, several[: len(one)])


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_of_checkpointed_layers(reentrant: bool, apart: bool) -> None:
    """C44: layers that are computed again in the backward pass have the gradients of those that are not.

    apart: as in the thread of a device, which does not know the context of the call.
    """
    model = model_of("llama").train()
    ids = rows()[1][None]
    found = []
    for again in (False, True, True):
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.zero_grad()
        with batch_invariant():
            loss = model(ids, labels=ids).loss
            (Context() if apart else copy_context()).run(loss.backward)
            assert mode_depths() == (1, 1)
        found.append([loss.detach(), *(each.grad.clone() for each in model.parameters())])
    for others in found[1:]:
        assert torch.equal(others[0], found[0][0])
        for one, two in zip(found[0], others, strict=True):
            assert torch.allclose(one, two, atol=2e-5 * float(two.abs().max()) + 1e-8)
