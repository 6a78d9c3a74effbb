"""Shared by the tests: IDS, Seen."""

from __future__ import annotations

from typing import Any

import torch
from prefix_reuse import words

import hf_paged
from hf_paged import Engine

IDS = words(2, 9)
NEW = 4
CALL = {
    "input_ids": IDS,
    "attention_mask": torch.ones_like(IDS),
    "max_new_tokens": NEW,
    "min_new_tokens": NEW,
}


class Seen:
    """A model, and the ways in which we see it. Each answers with the tokens of two prompts."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.engine: Engine | None = None

    def unseen(self) -> torch.Tensor:
        return self.model.generate(**CALL, do_sample=False)

    def generate(self) -> torch.Tensor:
        return self.model.generate(**CALL, do_sample=False, cache_implementation="paged")

    def prefixes(self) -> torch.Tensor:
        config = {"block_size": 4, "prefix_caching": True}
        for _ in range(2):
            found = self.model.generate(
                **CALL, do_sample=False, cache_implementation="paged", cache_config=config
            )
        return found

    def invariant(self) -> torch.Tensor:
        with hf_paged.batch_invariant():
            return self.generate()

    def open_engine(self) -> torch.Tensor:
        self.engine = self.engine or Engine(self.model, num_blocks=32, block_size=4)
        outputs = self.engine.generate(IDS.tolist(), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        return torch.cat([IDS, torch.tensor([output.sequences[0].token_ids for output in outputs])], 1)

    def closed_engine(self) -> torch.Tensor:
        found = self.open_engine()
        self.close()
        return found

    def released(self) -> torch.Tensor:
        found = self.closed_engine()
        hf_paged.release(self.model)
        return found

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None
