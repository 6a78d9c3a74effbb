"""The same call on stock and on pages, and what must be equal afterwards."""

from __future__ import annotations

import copy
from typing import Any

import torch
from releases import KEEPS_WHAT_LEFT
from transformers.cache_utils import Cache, EncoderDecoderCache

import hf_paged
from hf_paged.model.registry import memory_of

TOLERANCE = 2e-4


def both(model: Any, block_size: int = 4, seed: int = 0, **arguments: Any) -> tuple[Any, Any]:
    """The answers of stock and of the paged cache to one call."""
    torch.manual_seed(seed)
    stock = model.generate(**copy.copy(arguments))
    torch.manual_seed(seed)
    paged = model.generate(
        **copy.copy(arguments), cache_implementation="paged", cache_config={"block_size": block_size}
    )
    return stock, paged


def assert_same(model: Any, **arguments: Any) -> Any:
    """Stock and paged answer alike; the paged answer comes back."""
    stock, paged = both(model, **arguments)
    assert_equal(stock, paged)
    return paged


def assert_equal(stock: Any, paged: Any, where: str = "answer") -> None:
    """Identical ids, shapes and fields; numbers within the tolerance; caches by content."""
    if isinstance(stock, torch.Tensor):
        _assert_tensors(stock, paged, where)
    elif isinstance(stock, Cache):
        _assert_caches(stock, paged, where)
    elif isinstance(stock, dict):
        assert type(stock) is type(paged), where
        assert list(stock) == list(paged), f"{where}: fields {list(paged)}, expected {list(stock)}"
        for name in stock:
            assert_equal(stock[name], paged[name], f"{where}.{name}")
    elif isinstance(stock, (tuple, list)):
        assert len(stock) == len(paged), where
        for i, (one, other) in enumerate(zip(stock, paged, strict=True)):
            assert_equal(one, other, f"{where}[{i}]")
    else:
        assert stock == paged, where


def _assert_tensors(stock: torch.Tensor, paged: torch.Tensor, where: str) -> None:
    assert stock.shape == paged.shape, f"{where}: shape {tuple(paged.shape)}, expected {tuple(stock.shape)}"
    assert stock.dtype == paged.dtype, where
    if stock.is_floating_point():
        torch.testing.assert_close(
            paged, stock, atol=TOLERANCE, rtol=TOLERANCE, msg=lambda text: f"{where}: {text}"
        )
    else:
        assert torch.equal(stock, paged), f"{where}: {paged.tolist()}, expected {stock.tolist()}"


def _assert_caches(stock: Cache, paged: Cache, where: str) -> None:
    if isinstance(stock, EncoderDecoderCache):
        _assert_caches(stock.self_attention_cache, paged.self_attention_cache, f"{where}.self")
        _assert_caches(stock.cross_attention_cache, paged.cross_attention_cache, f"{where}.cross")
        return
    assert isinstance(paged, hf_paged.PagedCache), where
    assert stock.get_seq_length() == paged.get_seq_length(), where
    for i, (one, other) in enumerate(zip(stock.layers, paged.layers, strict=True)):
        for name in ("conv_states", "recurrent_states"):
            for number, state in getattr(one, name, {}).items():
                if state is not None:
                    torch.testing.assert_close(
                        getattr(other, name)[number], state, atol=TOLERANCE, rtol=TOLERANCE,
                        msg=lambda text, i=i, name=name: f"{where}.layers[{i}].{name}: {text}",
                    )  # fmt: skip
        if getattr(one, "keys", None) is None and not hasattr(other, "keys"):
            continue
        if one.keys is None:
            assert other.keys is None, f"{where}.layers[{i}]"
            continue
        starts = paged.sequences.starts
        first = stock.get_seq_length() - other.keys.shape[-2]
        for name in ("keys", "values"):
            mine, theirs = getattr(other, name), getattr(one, name)
            if KEEPS_WHAT_LEFT and other.is_sliding:
                theirs = theirs[..., -mine.shape[-2] :, :]
            assert mine.shape == theirs.shape, (
                f"{where}.layers[{i}].{name}: {tuple(mine.shape)}, expected {tuple(theirs.shape)}"
            )
            for row in range(mine.shape[0]):
                begin = max(0, starts[row] - first) if starts else 0
                torch.testing.assert_close(
                    mine[row, :, begin:], theirs[row, :, begin:], atol=TOLERANCE, rtol=TOLERANCE
                )


def assert_clean(model: Any, setting: str) -> None:
    """Every block is back, the books add up, the model is as it was."""
    memory = memory_of(model)
    memory.check()
    assert memory.held == 0, f"{memory.held} blocks are still held"
    assert "forward" not in model.__dict__
    for module in model.modules():
        config = getattr(module, "config", None)
        assert getattr(config, "_attn_implementation", None) != "hf_paged"
    assert model.config._attn_implementation == setting
