"""Latents (MLA) in the engine: read as they lie in the pages, in one flat row, captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common_reads import read_common_blocks_once
from latent_models import attention, deepseek, expanded
from releases import LATENTS
from tape import record
from tiny import build, config_class

from hf_paged.engine import Engine
from hf_paged.generate.install import install_cache, uninstall_cache
from hf_paged.model.rehearsal import RECORDERS

FAMILIES = ("deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash", "youtu")
LENGTHS = (7, 19, 33, 2)


def prompts() -> list[list[int]]:
    chance = torch.Generator().manual_seed(3)
    return [torch.randint(5, 80, (length,), generator=chance).tolist() for length in LENGTHS]


def answers(engine: Engine, **options: Any) -> list[list[int]]:
    outputs = engine.generate(prompts(), do_sample=False, **options)
    engine.check()
    return [output.sequences[0].token_ids for output in outputs]


def alone(model: Any, **options: Any) -> list[list[int]]:
    """The same prompts through stock generate(), one by one."""
    rows = [model.generate(torch.tensor([ids]), do_sample=False, **options)[0] for ids in prompts()]
    return [row[len(ids) :].tolist() for ids, row in zip(prompts(), rows, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_in_one_flat_row(family: str) -> None:
    """Prompts in chunks beside sequences that decode: the tokens of generate()."""
    model = build("causal", config_class("causal", family))
    right = alone(model, max_new_tokens=10)
    with Engine(model, block_size=4, max_batch_tokens=8) as engine:
        assert engine.stats()["form"] == "flat", engine.stats()["off"]
        assert answers(engine, max_new_tokens=10) == right


@LATENTS
def test_no_common_blocks_are_read_once_and_none_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps of samples of one prompt, whose latents torch reads row by row."""
    model = deepseek()
    read_common_blocks_once(monkeypatch, with_adapters=False)
    options: dict[str, Any] = {"num_return_sequences": 4, "do_sample": True, "seed": 1, "max_new_tokens": 12}
    found = []
    for way in ("off", "always"):
        with Engine(model, block_size=4, shared_reads=way) as engine:
            found.append(
                [each.token_ids for each in engine.submit(prompts()[2], **options).result().sequences]
            )
            stats = engine.stats()
    assert found[0] == found[1]
    assert stats["graphs"]["replayed"] > 0
    assert stats["shared_reads"]["tokens_unread"] == 0
    assert (
        stats["off"]["shared_reads"] == "latent attention (MLA) is read by plain torch, of each row by itself"
    )


@LATENTS
def test_one_path_before_and_after_a_paged_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither changes what the other does; decoding steps of both expand nothing of the past."""
    model = deepseek()
    right = alone(model, max_new_tokens=6)
    seen = expanded(model, monkeypatch)
    with Engine(model, block_size=4) as first:
        seen.clear()
        assert answers(first, max_new_tokens=6) == right
        assert seen == []
        ids = torch.tensor([prompts()[1]])
        model.generate(ids, max_new_tokens=6, cache_implementation="paged")
        assert seen == []
        assert answers(first, max_new_tokens=6) == right
        assert seen == []
    with Engine(model, block_size=4) as second:
        seen.clear()
        assert answers(second, max_new_tokens=6) == right
        assert second.stats()["form"] == "flat"
        assert seen == []


def test_an_engine_outlives_uninstall() -> None:
    """The plug of generate() is taken out and put in again under a running engine."""
    model = deepseek()
    right = alone(model, max_new_tokens=6)
    with Engine(model, block_size=4) as engine:
        uninstall_cache()
        try:
            assert answers(engine, max_new_tokens=6) == right
        finally:
            install_cache()
        assert answers(engine, max_new_tokens=6) == right


def test_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps over latents are replayed, chunks of prompts among them."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    model = deepseek()
    right = alone(model, max_new_tokens=16)
    with Engine(model, block_size=4, max_batch_tokens=16, prefix_caching=False) as engine:
        for _ in range(3):
            assert answers(engine, max_new_tokens=16) == right
        assert engine.stats()["graphs"]["replayed"] > 10


@pytest.mark.parametrize("what", ["adapter", "hook", "bias"])
def test_more_than_a_matrix(what: str) -> None:
    """A projection that does more is called as it is, on each sequence's own latents."""
    model = deepseek()
    served = model
    if what == "adapter":
        import peft

        config = peft.LoraConfig(r=2, target_modules=["kv_b_proj"], init_lora_weights=False)
        served = peft.get_peft_model(model, config).eval()
    elif what == "hook":
        attention(model).kv_b_proj.register_forward_hook(lambda module, args, output: output * 1.1)
    else:
        attention(model).kv_b_proj.bias = torch.nn.Parameter(torch.full((64,), 0.1))
    right = alone(served, max_new_tokens=6)
    with Engine(served, block_size=4, max_batch_tokens=12) as engine:
        assert engine.stats()["form"] == "flat", engine.stats()["off"]
        assert answers(engine, max_new_tokens=6) == right


def test_beams_samples_and_too_few_blocks() -> None:
    """Tables of latents are forked, reordered, swapped and recomputed like others."""
    model = deepseek()
    ids = prompts()[1]
    right = model.generate(torch.tensor([ids]), num_beams=3, max_new_tokens=8, do_sample=False)[0, len(ids) :]
    greedy = alone(model, max_new_tokens=20)
    with Engine(model, block_size=4, num_blocks=24, max_batch_tokens=16) as engine:
        beams = engine.submit(ids, num_beams=3, max_new_tokens=8, do_sample=False)
        assert answers(engine, max_new_tokens=20) == greedy
        assert beams.result().sequences[0].token_ids == right.tolist()
        assert engine.stats()["preemptions"] > 0
