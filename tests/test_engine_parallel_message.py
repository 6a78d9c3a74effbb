"""A step as numbers: what other ranks read is what rank 0's runner takes (C42)."""

from __future__ import annotations

from typing import Any

import pytest
from engine_answers import KINDS, PROMPTS, _model, small_engine

from hf_paged.engine.forward_batch import ForwardBatch, LastTokens
from hf_paged.engine.parallel.message import AdapterNews, StepDecoder, StepEncoder


@pytest.mark.parametrize("name", ["llama", "qwen2-window"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_is_the_same_on_the_other_side(
    name: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, tables and ids of every step, with chunks, samples, preemption and requests that come and go."""
    with small_engine(_model(name), num_blocks=30, run_ahead=ahead) as engine:
        encoder = StepEncoder()
        decoder = StepDecoder(engine.pools, LastTokens(6, engine.runner.eager.device))
        groups = len(engine.pools.groups)
        run = engine.runner.run
        decoding = []

        def watched(batch: ForwardBatch) -> Any:
            step = len(decoding)
            news = AdapterNews((step,) * (step % 2), ((0, ()), (1, (step, step + 1)))[: step % 3])
            slots = (
                None,
                *[tuple([(i + k) % 3 - 1 for i in range(len(batch.rows.sequences))]) for k in (0, 1)],
            )
            sent = batch._replace(adapters=slots[step // 2 % 3])
            numbers, shares = encoder.encode(sent, [], [7] * groups, True, news)
            found = decoder.decode(numbers)
            assert found.news == news
            assert found.batch.adapters == sent.adapters
            assert found.tops == [7] * groups
            assert (found.checks, found.shares) == (True, shares)
            rows, other = batch.rows, found.batch.rows
            for each in ("row_ids", "offsets", "counts", "step", "longest", "tokens", "decodes"):
                assert getattr(other, each) == getattr(rows, each), each
            assert found.batch.wanted == batch.wanted
            decoding.append(rows.decodes)
            for i, (own, theirs) in enumerate(zip(rows.sequences, other.sequences, strict=True)):
                for table, copy in zip(own.tables, theirs.tables, strict=True):
                    assert copy.length == rows.starts[i] + rows.counts[i]
                    assert copy.blocks == table.blocks[copy.released - table.released :]
            if not shares:
                device = engine.runner.eager.device
                assert found.batch.ids(device).tolist() == batch.ids(device).tolist()
            return run(batch)

        monkeypatch.setattr(engine.runner, "run", watched)
        requests = [
            engine.submit(PROMPTS[k % 4], max_new_tokens=9, seed=k, **kind) for k, kind in enumerate(KINDS)
        ]
        assert all(each.result().error is None for each in requests)
        assert max(decoding) > 1
