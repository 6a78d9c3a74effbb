"""Prompts that are more than ids: other ranks have them by number, while steps need them (C42)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_answers import PROMPTS, small_engine
from engine_parts import eager_of
from engine_steps import executor_of
from families import BY_NAME, build
from pictures import with_pictures
from releases import OMNI
from tiny import build as tiny_of
from tiny import config_class

from hf_paged.engine import Engine
from hf_paged.engine.multimodal.media import Media
from hf_paged.engine.parallel.message import AdapterNews, StepDecoder, StepEncoder
from hf_paged.engine.parallel.prompt_inputs import SharedInputs, on_device, on_host
from hf_paged.engine.worker.forward_batch import ForwardBatch, LastTokens


def sender_of(engine: Engine) -> tuple[SharedInputs, StepEncoder]:
    """The inputs that rank 0 has sent, and the writer of its messages."""
    shared = SharedInputs(engine.driver.loop.with_inputs)
    return shared, StepEncoder(shared, eager_of(engine).pools)


@pytest.mark.parametrize(
    "name", ["qwen2_vl", pytest.param("qwen3_omni_moe_thinker", marks=OMNI), "llama", "t5"]
)
def test_prompts_that_are_more_than_ids(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures with positions of their own, embeddings, and inputs of encoders: rows are given parts of what
    other ranks have by a number, for as long as a step needs it.
    """
    shows = name.startswith("qwen")
    model = tiny_of("image", config_class("image", name)) if shows else build(BY_NAME[name])
    prompts: list[dict[str, Any]] = [{"prompt": PROMPTS[1]}, {"prompt": PROMPTS[3]}]
    if shows:
        shown = with_pictures(model, rows=1)
        assert shown is not None
        prompts = [shown, {**shown, "pixel_values": shown["pixel_values"] * 0.5}, prompts[0]]
    elif name == "llama":
        prompts[0] = {"inputs_embeds": torch.randn(17, model.config.hidden_size)}
    with small_engine(model) as engine:
        pools = eager_of(engine).pools
        shared, encoder = sender_of(engine)
        decoder = StepDecoder(pools, LastTokens(6, eager_of(engine).device))
        run, show = engine.runner.run, engine.runner.encode_media
        most = across = 0

        def shown_there(media: Media, names: Any) -> None:
            show(media, names)
            copy = on_host(media)
            assert isinstance(copy, Media)
            assert copy.made is None
            copy.made, copy.extras = media.made, media.extras
            decoder.prompts[shared.add(media)] = copy

        def watched(batch: ForwardBatch) -> Any:
            nonlocal most, across
            for each in shared.missing(batch):
                decoder.prompts[shared.add(each)] = on_device(on_host(each), engine.runner.eager.device)
            sent, _ = encoder.encode(batch, [], True, AdapterNews())
            found = decoder.decode(sent).batch
            most = max(most, len(decoder.prompts))
            for i in range(len(batch.rows)):
                own, there = batch.inputs.get(i), found.inputs.get(i)
                if own is None or there is None:
                    continue
                assert (there.source is None) == (own.source is None)
                for one, other in ((own.embeds, there.embeds), (own.positions, there.positions)):
                    assert (one is None and other is None) or torch.equal(one, other)
            assert found.sources == batch.sources
            for row, source in zip(batch.rows.row_ids, batch.sources, strict=True):
                blocks = list(pools.groups.values())[-1].pool.blocks_for(source)
                own, there = (each.rows.tables[-1].first(row, blocks) for each in (batch, found))
                assert own == there
                across += blocks
            return run(batch)

        monkeypatch.setattr(executor_of(engine), "run", watched)
        monkeypatch.setattr(engine.runner, "encode_media", shown_there)
        for _ in range(2):
            handles = [engine.submit(**each, max_new_tokens=5, do_sample=False) for each in prompts]
            assert all(each.result().error is None for each in handles)
        assert engine.submit(**prompts[-1], max_new_tokens=5).result().error is None
        assert most > 0
        assert (across > 0) == (name == "t5")
        assert len(decoder.prompts) == (name == "t5")


def test_tables_of_rows_planned_one_by_one_are_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an encoder-decoder, none of which is in the table of rows: a step has their new blocks, one each."""
    with small_engine(build(BY_NAME["t5"]), num_blocks=200) as engine:
        shared, encoder = sender_of(engine)
        run, sizes = executor_of(engine).run, []

        def watched(batch: ForwardBatch) -> Any:
            for given in shared.missing(batch):
                shared.add(given)
            numbers, _ = encoder.encode(batch, [], True, AdapterNews())
            sizes.append(len(numbers))
            return run(batch)

        monkeypatch.setattr(executor_of(engine), "run", watched)
        prompts = [[5 + (7 * i + k) % 50 for k in range(40)] for i in range(4)]
        handles = [engine.submit(each, max_new_tokens=30, min_new_tokens=30) for each in prompts]
        assert all(handle.result().error is None for handle in handles)
        steady = sizes[2:30]
        assert len(steady) == 28
        assert max(steady) - min(steady) <= len(prompts)
