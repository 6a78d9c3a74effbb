"""Rows that read common blocks together, in float32: stock's tokens of each alone. On a GPU they do in captured
steps, else by the C++ op.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_paged_native
from hf_paged import Engine
from hf_paged.blocks import SharedReads

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
KERNELS = "triton" if GPU else "native"
pytestmark = pytest.mark.skipif(
    not GPU and hf_paged_native.compiler() is None, reason="there is no C++ compiler to build the op with"
)
NEW = 40 if GPU else 12
KINDS: dict[str, dict[str, Any]] = {"llama": {}}
if GPU:
    KINDS |= {"one key head": {"num_key_value_heads": 1}, "a key head each": {"num_key_value_heads": 8}}


@pytest.fixture(scope="module", autouse=True)
def _extensions(native_folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(native_folder))
        yield


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    if GPU:
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, vocab_size=512,
        max_position_embeddings=2048, eos_token_id=None, pad_token_id=0,
        **{"num_key_value_heads": 4, **KINDS[request.param]},
    )  # fmt: skip
    return LlamaForCausalLM(config).to(DEVICE).eval()


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 500, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


SYSTEM = ids(100, 0)
PROMPTS = [
    [*SYSTEM, *ids(40, 1)], [*SYSTEM, *ids(7, 2)], [*SYSTEM, *ids(40, 1), *ids(30, 3)], ids(50, 4),
    [*SYSTEM[:50], *ids(20, 5)], ids(9, 6), [*SYSTEM, *ids(40, 1)],
]  # fmt: skip


def alone(model: Any, prompt: list[int], **options: Any) -> list[list[int]]:
    given = torch.tensor([prompt], device=DEVICE)
    out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, **options)
    return [row[len(prompt) :] for row in out.tolist()]


def test_requests_behind_common_prompts(model: Any) -> None:
    """Groups come and go as requests do, with prompts in chunks beside them."""
    expected = [alone(model, prompt, do_sample=False)[0] for prompt in PROMPTS]
    options: dict[str, Any] = {"kernels": KERNELS, "num_blocks": 400, "max_batch_tokens": 64}
    with Engine(model, shared_reads="always", **options) as engine:
        for _ in range(2):
            handles = []
            members = 0
            for prompt in PROMPTS:
                handles.append(engine.submit(prompt, max_new_tokens=NEW))
                for _ in range(6 if GPU else 2):
                    engine.step()
                    members = max(members, engine.stats()["shared_reads"]["members"])
            assert [handle.result().sequences[0].token_ids for handle in handles] == expected
        stats = engine.stats()
        assert stats["graphs"]["replayed"] > NEW or not GPU
        assert "shared_reads" not in stats["off"]
        assert members >= 4
        assert stats["shared_reads"]["tokens_unread"] > 100 * NEW


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_beams(model: Any, options: dict[str, Any]) -> None:
    expected = [alone(model, prompt, do_sample=False, **options) for prompt in PROMPTS]
    with Engine(model, shared_reads="always", num_blocks=600, kernels=KERNELS) as engine:
        handles = [engine.submit(prompt, max_new_tokens=NEW, **options) for prompt in PROMPTS]
        found = [[each.token_ids for each in handle.result().sequences] for handle in handles]
    assert found == expected


def test_samples_under_pressure(model: Any) -> None:
    """Preempted groups come back to other blocks."""
    answers = []
    for way in ("off", "always"):
        with Engine(model, shared_reads=way, num_blocks=60 if GPU else 40, kernels=KERNELS) as engine:
            handles = [
                engine.submit(prompt, max_new_tokens=NEW, do_sample=True, seed=i, num_return_sequences=4)
                for i, prompt in enumerate(PROMPTS)
            ]
            answers.append([[each.token_ids for each in handle.result().sequences] for handle in handles])
            assert engine.stats()["preemptions"] > 0
    assert answers[0] == answers[1]


MODES: dict[str, dict[str, Any]] = {
    "greedy": {}, "beams": {"num_beams": 4}, "samples": {"do_sample": True, "num_return_sequences": 5},
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_generate(model: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a call, forked, reordered, and behind padding."""
    unread = []
    follow = SharedReads.follow

    def noted(books: SharedReads, *rows: Any) -> Any:
        numbers = follow(books, *rows)
        unread.append(books.unread)
        return numbers

    monkeypatch.setattr(SharedReads, "follow", noted)
    longest = max(map(len, PROMPTS))
    given = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS], device=DEVICE)
    options = {
        "input_ids": given, "attention_mask": (given != 0).long(), "max_new_tokens": NEW, "do_sample": False,
        **MODES[mode],
    }  # fmt: skip
    torch.manual_seed(0)
    expected = model.generate(**options)
    for _ in range(2):
        torch.manual_seed(0)
        config = {"shared_reads": "always", "prefix_caching": True, "kernels": KERNELS}
        found = model.generate(**options, cache_implementation="paged", cache_config=config)
        assert found.tolist() == expected.tolist()
    assert sum(unread) > 0
