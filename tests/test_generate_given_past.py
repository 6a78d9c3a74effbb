"""Prefix tuning in a paged generate(): peft's keys and values lie in pages, and all rows share their blocks."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from families import BY_NAME, build
from releases import prefixes_are_ignored

from hf_paged import Engine
from hf_paged.model.cache_name import cache_in

COUNT = 6
IDS = torch.randint(5, 90, (3, 9), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[1, :4] = 0
KINDS: dict[str, Any] = {
    "prefix tuning": peft.PrefixTuningConfig,
    "Cartridge": peft.CartridgeConfig,
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    if prefixes_are_ignored():
        pytest.skip("stock's generate() computes without the prefix on this release")
    torch.manual_seed(0)
    config = KINDS[request.param](task_type="CAUSAL_LM", num_virtual_tokens=COUNT)
    made = peft.get_peft_model(build(BY_NAME["llama"]), config).eval()
    with torch.no_grad():
        for parameter in made.prompt_encoder.parameters():
            parameter += torch.randn_like(parameter)
    return made


def generated(model: Any, **options: Any) -> Any:
    """The answer of a call; a fallback to stock's cache would be an error."""
    torch.manual_seed(0)
    call = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "max_new_tokens": 8, "do_sample": False}
    return model.generate(**{**call, **options})


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one row": {"input_ids": IDS[:1], "attention_mask": torch.ones_like(IDS[:1])},
    "padded": {"attention_mask": PADDED},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "attention_mask": PADDED},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_stock(model: Any, mode: str) -> None:
    paged = {"cache_implementation": "paged", "cache_config": {"block_size": 4, "prefix_caching": True}}
    expected = generated(model, **MODES[mode])
    for _ in range(2):  # nothing of the first is found by the second
        assert torch.equal(generated(model, **MODES[mode], **paged), expected)
    plain = model.get_base_model().generate(
        input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=8, do_sample=False
    )
    if mode == "greedy":
        assert not torch.equal(plain, expected)


def test_rows_share_the_blocks_of_the_prefix(model: Any) -> None:
    """It is written once; the block that it fills in part is copied by all rows but one."""
    found = generated(
        model,
        cache_implementation="paged",
        cache_config={"block_size": 4},
        return_dict_in_generate=True,
        output_logits=True,
    )
    stock = generated(model, return_dict_in_generate=True, output_logits=True)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(stock.logits), atol=2e-4, rtol=2e-4)
    cache = cache_in(found)
    assert cache.get_seq_length() == COUNT + IDS.shape[1] + 7
    assert set(cache.paths) == {"paged"}
    tables = cache.tables()
    assert len({row[0] for row in tables}) == 1
    assert len({row[1] for row in tables}) == len(tables)


@pytest.mark.skipif(prefixes_are_ignored(), reason="stock's generate() computes without the prefix")
def test_layers_with_windows_shorter_than_the_prefix() -> None:
    """peft's cache lacks the tokens that no other one sees; in the engine, too."""
    torch.manual_seed(0)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=COUNT)
    made = peft.get_peft_model(build(BY_NAME["gemma2"]), config).eval()
    with torch.no_grad():
        made.prompt_encoder["default"].embedding.weight += torch.randn(1)
    expected = generated(made)
    assert torch.equal(generated(made, cache_implementation="paged"), expected)
    with Engine(made, block_size=4, num_blocks=60) as engine:
        outputs = [engine.submit(ids.tolist(), max_new_tokens=8, do_sample=False) for ids in IDS]
        found = [
            [*ids.tolist(), *each.result().sequences[0].token_ids]
            for ids, each in zip(IDS, outputs, strict=True)
        ]
        engine.check()
    assert found == [[token for token in row if token] for row in expected.tolist()]
