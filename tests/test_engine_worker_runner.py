"""Sequences of one step in the form that a model takes: flat, or row by row."""

from __future__ import annotations

import torch
from engine_answers import PROMPTS
from families import BY_NAME, build

from hf_paged.blocks import BlockTableArray, append
from hf_paged.engine import EngineConfig
from hf_paged.engine.worker.forward_batch import ForwardBatch, LastTokens
from hf_paged.engine.worker.pools import Pools
from hf_paged.engine.worker.runner import Runner
from hf_paged.engine.worker.trial import Trial
from hf_paged.scheduling import Request, ScheduledBatch, ScheduledRow, SequenceGroup


def test_rows_of_a_step_are_strangers() -> None:
    """A flat row of a prompt, a chunk and a decoding step gives each the logits it has alone."""
    model = build(BY_NAME["qwen2-window"])
    pools = Pools(model, EngineConfig(block_size=4, num_blocks=20))
    tried = Runner(model, pools)
    Trial(tried).run()
    pools.settle(None)
    prompts, done = [PROMPTS[1], PROMPTS[2], PROMPTS[5]], [0, 4, 11]
    requests = [Request(i, tuple(prompt), len(prompt)) for i, prompt in enumerate(prompts)]
    sequences = [SequenceGroup(request, pools.kv_groups).leader for request in requests]
    for row, sequence in enumerate(sequences):
        sequence.row = row
    tables = tuple(BlockTableArray() for _ in pools.groups)

    def computed(ends: list[int]) -> torch.Tensor:
        """The logits behind the sequences that these steps bring to their end."""
        rows = []
        for sequence, end in zip(sequences, ends, strict=True):
            count = end - sequence.computed
            if count:
                for table in sequence.tables:
                    append([table], [count])
                wanted = (sequence,) if end == len(sequence.tokens) else ()
                rows.append(ScheduledRow(sequence, sequence.computed, count, wanted))
                sequence.computed = end
        batch = ScheduledBatch(tables=tables).followed_by(rows)
        return tried.run(ForwardBatch.planned(batch, LastTokens(0, tried.eager.device))).logits

    assert computed(done).shape == (0, model.config.vocab_size)
    logits = computed([len(prompt) for prompt in prompts])
    for prompt, found in zip(prompts, logits, strict=True):
        torch.testing.assert_close(found, model(torch.tensor([prompt])).logits[0, -1], atol=2e-4, rtol=2e-4)
    for sequence in sequences:
        sequence.free()
    pools.free()
