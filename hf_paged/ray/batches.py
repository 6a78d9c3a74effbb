"""Prompts of a Ray data set to answers: one engine in each worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from ..engine import Engine, EngineConfig
from ..serve.link.loading import Source
from .rows import Checkpoint, RowAnswer, answered, row_name

Factory = Callable[[], tuple[Any, Any]]
"""Makes a model and its tokenizer, in the worker."""


class BatchJob(NamedTuple):
    """Every worker's job: where its model comes from, what it reads and what it writes."""

    model: str | Factory
    prompt: str
    output: str
    engine: Mapping[str, Any]
    keywords: Mapping[str, Any]
    checkpoint: str | None = None
    key: str | None = None

    def load(self) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        if isinstance(self.model, str):
            source = Source(self.model)
            return source.load(), source.load_tokenizer()
        made = self.model()
        if not (isinstance(made, tuple) and len(made) == 2):
            raise TypeError(f"the factory made a {type(made).__name__}, expected (model, tokenizer)")
        return made

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that decide answers, for the checkpoint."""
        made = self.model
        name = made if isinstance(made, str) else f"{made.__module__}.{made.__qualname__}"
        return {"model": name, "prompt": self.prompt, "key": self.key, "keywords": dict(self.keywords)}


def map_batches(
    dataset: Dataset,
    model: str | os.PathLike[str] | Factory,
    *,
    prompt: str = "prompt",
    output: str = "generated_text",
    checkpoint: str | os.PathLike[str] | None = None,
    key: str | None = None,
    engine: Mapping[str, Any] | None = None,
    batch_size: int = 256,
    concurrency: int | tuple[int, int] = 1,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    **keywords: Any,
) -> Dataset:
    """The data set with an answer to every row: columns `output`, `finish_reason` and `error`.

    model: a name on the Hub, a folder, or a function that makes (model, tokenizer) in the worker. prompt: the
    column with texts, chats or token ids. engine: options of `Engine`. keywords: of `Engine.submit`.
    concurrency: workers, or the fewest and the most. num_cpus, num_gpus: of each.

    As many rows come out as go in. A row that has no complete answer has the reason in `error`, else null. A
    worker that dies is replaced. checkpoint: a folder that all workers reach, where finished batches are kept
    by the column `key`; a further call with it computes only what is missing.
    """
    options = dict(engine or {})
    EngineConfig.of(None, options)  # an unknown option is an error here, not in each worker
    if hasattr(model, "generate") or hasattr(model, "forward"):
        raise TypeError(
            f"map_batches got a live {type(model).__name__}, which would travel to every worker; give its "
            "path, or a function that makes (model, tokenizer)"
        )
    if not isinstance(model, str | os.PathLike) and not callable(model):
        raise TypeError(f"model must be a name, a path or a function, got {model!r}")
    if (checkpoint is None) is not (key is None):
        raise ValueError(
            "checkpoint and key belong together: a folder, and the column that names rows; give both or none"
        )
    if keywords.get("num_return_sequences", 1) != 1:
        raise ValueError("a row has one answer; repeat rows instead of giving num_return_sequences")
    job = BatchJob(
        os.fspath(model) if isinstance(model, str | os.PathLike) else model,
        prompt,
        output,
        options,
        keywords,
        None if checkpoint is None else os.path.abspath(checkpoint),
        key,
    )
    if job.checkpoint is not None:
        Checkpoint(job.checkpoint).begin(job.facts)
    least, most = (concurrency, concurrency) if isinstance(concurrency, int) else concurrency
    return dataset.map_batches(
        Worker,
        fn_constructor_args=(job,),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(min_size=least, max_size=most),
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        udf_modifying_row_count=False,
    )


class Worker:
    """An engine in a worker of Ray Data. Several batches are under way at once, so it does not run empty at
    the end of each.
    """

    def __init__(self, job: BatchJob) -> None:
        self._job = job
        model, tokenizer = job.load()
        self._engine = Engine(model, tokenizer, **{"fuse_projections": True, **job.engine})
        self._checkpoint = None if job.checkpoint is None else Checkpoint(job.checkpoint)

    async def __call__(self, table: pa.Table) -> pa.Table:
        """A batch with its answers."""
        for name in {self._job.output, "finish_reason", "error"}.intersection(table.column_names):
            raise ValueError(f"the data set has a column {name!r} already; rename it")
        prompts = self._column(table, self._job.prompt)
        if self._checkpoint is None:
            return self._with(table, await self._answered(prompts))
        keys = self._column(table, str(self._job.key))
        names = [row_name(key, prompt) for key, prompt in zip(keys, prompts, strict=True)]
        found = self._checkpoint.find(names)
        missing = {name: prompt for name, prompt in zip(names, prompts, strict=True) if name not in found}
        made = dict(zip(missing, await self._answered(list(missing.values())), strict=True))
        self._checkpoint.add(made)
        return self._with(table, [found.get(name) or made[name] for name in names])

    async def _answered(self, prompts: list[Any]) -> list[RowAnswer]:
        return await answered(self._engine, prompts, self._job.keywords)

    def _column(self, table: pa.Table, name: str) -> list[Any]:
        if name not in table.column_names:
            raise ValueError(f"the data set has no column {name!r}, but {table.column_names}")
        found: list[Any] = table.column(name).to_pylist()
        return found

    def _with(self, table: pa.Table, answers: list[RowAnswer]) -> pa.Table:
        columns = {
            self._job.output: [each.text for each in answers],
            "finish_reason": [each.finish_reason for each in answers],
            "error": [each.error for each in answers],
        }
        for name, values in columns.items():
            table = table.append_column(name, pa.array(values, pa.string()))
        return table
