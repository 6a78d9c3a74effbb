"""Options of the manager of continuous batching: each is honoured, or refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from batch_managers import alone, batching_model, greedy, manager_of  # noqa: F401  # a fixture
from engine_answers import PROMPTS
from engine_parts import layer_groups
from transformers import ContinuousBatchingConfig


def test_what_a_config_leaves_open_is_neutral(model: Any) -> None:
    """As with transformers' own manager: the model's generation config is for generate()."""
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.do_sample = True
    found = model.generate_batch(PROMPTS[1:2], generation_config=greedy())
    assert found["req_0"].generated_tokens == alone(model, PROMPTS[1], repetition_penalty=1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("scheduler_type", "prefill_first"), ("max_queue_size", 5), ("cpu_offload_space_safety_threshold", 0.1)],
    ids=["scheduler", "queue", "host"],
)
def test_options_that_cannot_be_honoured_are_refused_by_name(model: Any, field: str, value: Any) -> None:
    config = ContinuousBatchingConfig(**{"cpu_offload_space": None, field: value})
    with pytest.raises(ValueError, match=rf"continuous_batching_config\.{field}=.* is not honoured"):
        model.init_continuous_batching(greedy(), continuous_batching_config=config)


def test_every_option_is_known(model: Any) -> None:
    """A field that a new transformers brings is refused until it is mapped."""
    options = {
        "max_batch_tokens": 64,
        "max_requests_per_batch": 4,
        "allow_block_sharing": False,
        "use_async_batching": True,
        "use_cuda_graph": (False, False),
        "safety_margin": 0.1,
        "cpu_offload_space": 1.0,
        "max_blocks_per_request": 0,
    }
    engine = manager_of(model, **options).engine
    config = engine.config
    assert (config.block_size, config.num_blocks) == (4, 60)
    assert (config.max_batch_tokens, config.max_batch_sequences) == (64, 4)
    assert (config.prefix_caching, config.run_ahead, config.graphs) == (False, True, False)
    assert (config.watermark, config.host_blocks) == (0.1, None)
    assert manager_of(model, max_memory_percent=0.01, num_blocks=None).engine.config.memory_fraction == 0.01


def test_every_option_stands_in_the_docs() -> None:
    page = (Path(__file__).parent.parent / "docs" / "trl.md").read_text()
    table = page.partition("| `ContinuousBatchingConfig` |")[2].partition("\n\n")[0]
    for field in dataclasses.fields(ContinuousBatchingConfig):
        assert f"`{field.name}`" in table


def test_no_more_waits_on_the_host_than_the_config_says(model: Any) -> None:
    """cpu_offload_space is in GiB; a block of the tiny model is some KiB."""
    engine = manager_of(model, cpu_offload_space=3.5 * 4 * 512 / 1024**3).engine
    group = layer_groups(engine)[0]
    assert group.host is not None
    assert group.host.most == 3.5 * 4 * 512 // group.block_bytes
    assert 0 < group.host.most < group.pool.total
    assert group.host.reserve(group.host.most)
    assert group.host.bytes <= 3.5 * 4 * 512
    assert not group.host.reserve(group.host.most + 1)
    for options in ({"cpu_offload_space": 0.0}, {"cpu_offload_space_safety_threshold": 0.0}):
        engine = manager_of(model, **{"cpu_offload_space": 1.0, **options}).engine
        assert engine.stats()["host"] == {}


def test_timeouts_and_graphs_are_those_of_the_config(model: Any) -> None:
    assert manager_of(model, cpu_group_timeout=7.0).engine.config.rank_timeout == 7
    assert manager_of(model, cpu_group_timeout=None).engine.config.rank_timeout > 1e7
    assert not manager_of(model, use_cuda_graph=(True, False)).engine.config.graphs  # of prefill alone
    assert manager_of(model, use_cuda_graph=(False, True)).engine.config.graphs
