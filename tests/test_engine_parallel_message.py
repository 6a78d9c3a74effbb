"""A step as numbers: what other ranks read is what rank 0's runner takes (C42)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_answers import KINDS, PROMPTS, _model, small_engine
from engine_steps import executor_of

from hf_paged.blocks import COLUMNS, NO_NUMBERS
from hf_paged.engine.parallel.message import AdapterNews, StepDecoder, StepEncoder
from hf_paged.engine.parallel.prompt_inputs import SharedInputs
from hf_paged.engine.worker.forward_batch import ForwardBatch, LastTokens, ScoredRow
from hf_paged.scheduling import ScheduledBatch


def sent_columns(encoder: StepEncoder, decoder: StepDecoder, batch: ForwardBatch) -> None:
    """Columns go out when they change, each by itself."""
    count = len(batch.rows)
    first = {"adapter_slot": (1,) * count, "rope_delta": (3,) * count}
    equal = {"adapter_slot": (1,) * count, "rope_delta": (3,) * count}
    second = {**first, "rope_delta": (4,) * count}
    sizes = []
    for numbers in (first, first, equal, second, NO_NUMBERS, NO_NUMBERS):
        sent, _ = encoder.encode(batch._replace(columns=numbers), [], True, AdapterNews())
        sizes.append(len(sent))
        assert decoder.decode(sent).batch.columns == numbers
    steady = min(sizes[1], sizes[5])
    sent_to_all = sum(column.sent for column in COLUMNS.values())
    assert [size - steady for size in sizes[1:]] == [
        *(0, sent_to_all),
        *(sent_to_all + count, sent_to_all, 0),
    ]


@pytest.mark.parametrize("name", ["llama", "qwen2-window"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_is_the_same_on_the_other_side(
    name: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, tables and ids of every step, with chunks, samples, preemption and requests that come and go."""
    with small_engine(_model(name), num_blocks=30, run_ahead=ahead) as engine:
        encoder = StepEncoder(SharedInputs({}), engine.pools)
        decoder = StepDecoder(engine.pools, LastTokens(6, engine.runner.eager.device))
        run = engine.runner.run
        decoding = []
        scored: list[ScoredRow] = []

        def watched(batch: ForwardBatch) -> Any:
            step = len(decoding)
            news = AdapterNews((step,) * (step % 2), ((0, ()), (1, (step, step + 1)))[: step % 3])
            slots = (
                None,
                *[tuple([(i + k) % 3 - 1 for i in range(len(batch.rows.sequences))]) for k in (0, 1)],
            )
            given = slots[step // 2 % 3]
            sent = batch._replace(columns=batch.columns | ({"adapter_slot": given} if given else {}))
            numbers, shares = encoder.encode(sent, [], True, news)
            found = decoder.decode(numbers)
            assert found.news == news
            assert found.batch.columns == sent.columns
            assert (found.checks, found.shares) == (True, shares)
            sent_columns(encoder, decoder, batch)
            rows, other = batch.rows, found.batch.rows
            for each in ("row_ids", "starts", "counts", "longest", "tokens", "decodes"):
                assert getattr(other, each) == getattr(rows, each), each
            assert found.batch.wanted == batch.wanted
            assert found.batch.of_ids == batch.of_ids
            assert [each[:3] for each in found.batch.scored] == [each[:3] for each in batch.scored]
            scored.extend(batch.scored)
            decoding.append(rows.decodes)
            assert isinstance(rows, ScheduledBatch)
            for sequence, row in zip(rows.sequences, other.row_ids, strict=True):
                for table, there in zip(sequence.tables, other.tables, strict=True):
                    assert there.matches(row, table)
            if not shares:
                device = engine.runner.eager.device
                assert found.batch.ids(device).tolist() == batch.ids(device).tolist()
            return run(batch)

        monkeypatch.setattr(executor_of(engine), "run", watched)
        requests = [
            engine.submit(PROMPTS[k % 4], max_new_tokens=9, seed=k, **kind) for k, kind in enumerate(KINDS)
        ]
        requests.append(engine.submit(PROMPTS[3], max_new_tokens=2, prompt_logprobs=1))
        assert all(each.result().error is None for each in requests)
        assert max(decoding) > 1
        assert scored


def test_a_step_that_goes_out_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are tried by themselves, because their first step could not be sent: other ranks have the
    tables of each.
    """
    with small_engine(_model("llama"), max_batch_tokens=40) as engine:
        pools = engine.pools
        encoder = StepEncoder(SharedInputs({}), pools)
        decoder = StepDecoder(pools, LastTokens(6, torch.device("cpu")))
        run = executor_of(engine).run
        parts = 0

        def watched(batch: ForwardBatch) -> Any:
            nonlocal parts
            for i in range(len(batch.rows)):
                part = batch.select([i])
                numbers, _ = encoder.encode(part, [], True, AdapterNews())
                found = decoder.decode(numbers).batch.rows
                assert isinstance(part.rows, ScheduledBatch)
                for table, there in zip(part.rows.sequences[0].tables, found.tables, strict=True):
                    assert there.matches(found.row_ids[0], table)
                parts += 1
            return run(batch)

        monkeypatch.setattr(executor_of(engine), "run", watched)
        handles = [engine.submit(prompt, max_new_tokens=6) for prompt in PROMPTS[:4]]
        assert all(handle.result().error is None for handle in handles)
        assert parts > 8


@pytest.mark.parametrize("rows", [8, 64])
def test_a_steady_step_is_few_numbers(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows decode: what has not changed is not sent again."""
    options = {"num_blocks": 2 * rows, "block_size": 64, "run_ahead": True}
    batch_sizes = {"max_batch_sequences": rows, "max_batch_tokens": 3 * rows}
    with small_engine(_model("llama"), **options, **batch_sizes) as engine:
        encoder = StepEncoder(SharedInputs({}), engine.pools)
        run, sent = executor_of(engine).run, []

        def watched(batch: ForwardBatch) -> Any:
            numbers, _ = encoder.encode(batch, [], True, AdapterNews())
            sent.append((batch.rows.decodes, len(numbers)))
            return run(batch)

        monkeypatch.setattr(executor_of(engine), "run", watched)
        new = {"max_new_tokens": 2 * rows, "min_new_tokens": 2 * rows, "do_sample": False}
        handles = [engine.submit([5 + k % 60, 7, 9], **new) for k in range(rows)]
        while sum(decodes == rows for decodes, _ in sent) < 12:
            engine.step()
        steady = [size for decodes, size in sent if decodes == rows][-8:]
        assert max(steady) < 100
        for handle in handles:
            handle.cancel()
