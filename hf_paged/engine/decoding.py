"""Steps that are replayed as CUDA graphs: every token a row of its own, one graph for each bucket of rows.

A short chunk of a prompt is so many rows over one table, each one token longer than the one before. That
reads the chunk's past once for every token of it; where there is more to read, chunks are spans, which read
it once for many.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch

from ..kv import LayerGroup, LayerKind, StaticBatch, StaticSpans, is_out_of_memory
from ..kv.upload import upload
from ..model.attention import Forward, running
from ..model.capture.compile import Compilation, CompiledFusion, reason_of
from ..model.capture.fusion import Fusion, fused
from ..model.capture.graph import AGREE, SMALLEST_WIDTH, WIDEST, agree, bucket_of
from ..model.capture.products import lay_side_by_side
from ..model.capture.rehearsal import RECORDERS, Rehearsal
from ..model.lazy import NotCapturable
from ..model.lengths import LengthsOnDevice, lengths_on_device
from ..model.lookout import Lookout
from ..model.state import ModelState
from ..scheduling import ScheduledBatch
from .forward_batch import ForwardBatch
from .sampling.answers import Answer, place_for

if TYPE_CHECKING:
    from .runner import Runner

logger = logging.getLogger("hf_paged")

AFTER = 2
"""A step of so many rows is captured when it comes for this time."""
SPARE, WORTH = 512, 5_000
"""How many rows more than a step a graph may have to stand in for its own, and as long as it has computed
fewer rows for nobody. Of an 8B model on an H200 512 cost less than launching a step one operation at a time,
5,000 about what a capture does."""
WIDTHS = [64 * 8**i for i in range(8)]
"""Blocks of a row in the tables of graphs."""
MOST_PAIRS = 2**17
"""How many tokens those of prompts may look at in one step, each counted by itself: beyond, one tile for many
of them is faster.
"""
MOST_IN_TORCH = 2**17
"""The same where plain torch reads, to which spans are rows like others."""
Form = Literal["single", "rows", "spans"]
"""Whether all rows are sequences whose logits are wanted; if not, what chunks of prompts are."""
FORMS: tuple[Form, ...] = get_args(Form)
"""Each can hold what those before it can."""


class Shape(NamedTuple):
    """What a graph has room for."""

    rows: int
    """The tokens of a step."""
    width: int
    """The blocks of a row."""
    form: Form


@dataclass
class _CapturedStep:
    """One captured step, with the tensors that it reads and answers in."""

    ids: torch.Tensor
    """[rows, 1]"""
    places: torch.Tensor | None
    """[most sequences]: the rows whose logits are wanted; None if all are."""
    batches: dict[LayerKind, StaticBatch]
    state: ModelState
    pools: tuple[Any, ...]
    """Where the pools lay, and of what."""
    spans: bool
    """Whether chunks of prompts are spans."""
    answer: Answer
    """Of the wanted rows, the same memory for all graphs: the next replay writes over it."""
    shift: torch.Tensor | None = None
    """[rows]: how far tokens stand behind their number, where any may."""
    replay: Callable[[], None] = lambda: None
    agreed: int = 0
    compiled: bool = False


class Decoding:
    """The captured steps of one engine. A step that no graph can hold is the runner's to compute."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.counts: Counter[Literal["captured", "compiled", "replayed"]] = Counter()
        self.reasons: dict[Shape, str] = {}
        """Why steps of a shape are not captured."""
        self.compilation = Compilation() if runner.pools.config.compile else None
        self.moves = False
        """Whether tokens may stand elsewhere than their number says, and captured steps are told where."""
        self._steps: dict[Shape, _CapturedStep] = {}
        self._seen: Counter[Shape] = Counter()
        self._idle: Counter[Shape] = Counter()
        """The rows that graphs for more have computed for nobody, where they stood in."""
        self._rehearsed: dict[Form, LengthsOnDevice | None] = {}
        """Of which forms a step may be captured, and what for the model's counting."""
        self._pool: Any = None
        self._most = bucket_of(runner.pools.config.limits().sequences)
        """Rows whose logits may be wanted in one step."""
        self._answer: Answer | None = None
        self._lookout: Lookout | None = None
        """What was last seen of the model; it keeps what it saw until it is asked again."""

    def prepare(self, run: Callable[[], object]) -> None:
        """Get the model ready for compiled layers, or say why there are none. `run` runs it, somehow."""
        if self.compilation is None:
            return
        if self.runner.why_rows is not None:
            self.compilation.give_up(f"sequences are run one by one: {self.runner.why_rows}")
        elif self.runner.device.type not in RECORDERS:
            self.compilation.give_up(f"it is for captured steps, and there are none on {self.runner.device}")
        else:
            with self.runner.pools.memory.lock:
                lay_side_by_side(self.runner.model, run)

    def run(self, batch: ForwardBatch) -> Answer | None:
        """The answer for the wanted rows; None if no trusted graph has it. The next run writes over it."""
        shape = self._shape(batch)
        step = self._fitting(shape) if shape is not None else None
        if step is None:
            return None
        if step.pools != self._pools():
            self.forget()
            return None
        self._load(step, batch)
        step.replay()
        # Changes of the model are looked for while the device works.
        if not self._stands(step):
            self.forget()
            return None
        self.counts["replayed"] += 1
        return step.answer.first(len(batch.wanted) if step.places is not None else len(batch.rows.sequences))

    def _fitting(self, shape: Shape) -> _CapturedStep | None:
        """The trusted graph for a shape: its own, or as long as that costs less than a capture, the next
        larger one.
        """
        own = self._steps.get(shape)
        if own is not None:
            return own if own.agreed >= AGREE else None
        self._seen[shape] += 1
        if self._idle[shape] > WORTH and shape not in self.reasons:
            return None
        rows, width, form = shape
        fits = [
            known for known, step in self._steps.items()
            if step.agreed >= AGREE and rows <= known.rows <= rows + SPARE and width <= known.width
            and FORMS.index(form) <= FORMS.index(known.form)
        ]  # fmt: skip
        if not fits:
            return None
        best = min(fits, key=lambda known: (known.rows, FORMS.index(known.form), known.width))
        self._idle[shape] += best.rows - rows
        return self._steps[best]

    def learn(self, batch: ForwardBatch, logits: torch.Tensor) -> None:
        """After a batch was computed without a graph: capture the step, or see whether its graph says the
        same.
        """
        shape = self._shape(batch)
        if shape is None or shape in self.reasons:
            return
        try:
            step = self._steps.get(shape)
            if step is None and self._seen[shape] >= AFTER:
                step = self._capture(shape, batch, logits.shape[1])
            if step is not None and step.agreed < AGREE and not self._try(step, batch, logits):
                self.runner.flat(batch)  # so is what it has stored
                self._distrust(shape, step)
        except Exception as error:
            self._steps.pop(shape, None)
            if is_out_of_memory(error):
                self._seen[shape], self._idle[shape] = -200, 0  # there may be room later
                return
            self.reasons[shape] = f"{type(error).__name__}: {error}".split("\n")[0]
            logger.info("a decoding step of the engine is not captured: %s", self.reasons[shape])
            if self.compilation is not None and not self.counts["captured"]:
                self.compilation.tell(f"a step cannot be captured, {self.reasons[shape]}")

    def forget(self) -> None:
        """Drop every graph: the model or the pools are not what they were."""
        self._steps.clear()
        self._seen.clear()
        self._idle.clear()
        self._rehearsed.clear()
        self._lookout = None

    # ---- what a step is captured for

    def _shape(self, batch: ForwardBatch) -> Shape | None:
        if self.runner.device.type not in RECORDERS or (batch.inputs and not batch.of_ids):
            return None
        groups = self.runner.pools.groups.values()
        if not 0 < len(batch.rows.sequences) <= self._most or not all(group.stores for group in groups):
            return None  # the pools were given back, and come again with this step
        # Latents are read by plain torch, whatever the kernels are.
        kernels = not self.runner.expanding and all(
            group.captured_ops.kernels is not None for group in groups
        )
        decodes = batch.rows.decodes == len(batch.rows.sequences)
        form = "single" if decodes else self._form(batch.rows, kernels)
        if form is None:
            return None
        size = next(iter(groups)).pool.block_size
        blocks = -(-batch.rows.longest // size)
        rows = bucket_of(batch.rows.decodes if decodes else batch.rows.tokens, 8 if form == "single" else 4)
        if kernels:
            # Kernels read what is there, so a wide table costs its upload and no more.
            return Shape(rows, next(width for width in WIDTHS if width >= blocks), form)
        width = max(SMALLEST_WIDTH, 1 << (blocks - 1).bit_length())
        if any(width * group.pool.block_size > WIDEST for group in groups):
            return None
        return Shape(rows, width, form)

    @staticmethod
    def _form(batch: ScheduledBatch, kernels: bool) -> Form | None:
        """What the chunks of a batch are in a graph, None if they are the flat row's."""
        rows = batch.rows_behind
        if all(count == 1 and samples for _, _, count, samples in rows):
            return "single"
        pairs = sum(count * (start + count) for _, start, count, _ in rows if count > 1)
        if pairs <= MOST_PAIRS:
            return "rows"
        return "spans" if kernels or pairs <= MOST_IN_TORCH else None

    def _pools(self) -> tuple[Any, ...]:
        return tuple(
            (data.data_ptr(), data.dtype)
            for group in self.runner.pools.groups.values()
            for data in group.tensors
        )

    def look(self) -> None:
        """See whether the model is still the one that the steps were captured over: they read the memory that
        it had then.
        """
        state = self._state() if self._steps else None
        if state is not None and not all(self._is_of(step, state) for step in self._steps.values()):
            self.forget()

    def _stands(self, step: _CapturedStep) -> bool:
        """Whether the model is still the one that a step was captured over, as far as somebody has to look in
        this step.
        """
        if self._lookout is None or not self.runner.checks.unseen:
            return self._is_of(step, self._state())
        return self._is_of(step, self._lookout.state)

    @staticmethod
    def _is_of(step: _CapturedStep, state: ModelState) -> bool:
        if step.state is not state and step.state == state:
            step.state = (
                state  # a state that was read again: the next comparison is of one object with itself
            )
        return step.state is state

    def _state(self) -> ModelState:
        return self.runner.plugged(self._look_out).state

    def _look_out(self) -> Lookout:
        model = self.runner.model
        if self._lookout is None or not self._lookout.unchanged(model.forward):
            self._lookout = Lookout(model, model.forward)
        return self._lookout

    # ---- one step

    def _load(self, step: _CapturedStep, batch: ForwardBatch) -> None:
        """Enter a batch in a captured step's tensors; the tables have taken its tokens already."""
        if step.places is not None:
            batch = self._load_chunks(step, step.places, batch)
        rows = batch.rows
        for tables, static in zip(rows.tables, step.batches.values(), strict=True):
            static.spread(tables, rows.row_ids, rows.offsets, rows.step, rows.counts)
        ids = batch.ids(step.ids.device)
        step.ids[: len(ids), 0].copy_(ids)
        if step.shift is not None:
            step.shift[: len(ids)].copy_(upload(batch.rope_deltas(), step.shift.device))

    def _load_chunks(self, step: _CapturedStep, places: torch.Tensor, batch: ForwardBatch) -> ForwardBatch:
        """Enter which tokens' logits are wanted: the batch in the order of the step's rows."""
        wanted = batch.wanted
        order = list(range(len(batch.rows)))
        if step.spans:
            order.sort(key=lambda i: batch.rows.counts[i] > 1)  # sequences of one token come first
            batch = batch.select(order)
        ends = dict(zip(order, accumulate(batch.rows.counts), strict=True))
        last = [ends[i] - 1 for i in wanted] or [0]
        places[: len(last)].copy_(upload(last, places.device))
        return batch

    def _try(
        self,
        step: _CapturedStep,
        batch: ForwardBatch,
        logits: torch.Tensor,
    ) -> bool:
        """Replay a step whose logits are known: whether they come out."""
        if not len(logits):
            return True
        self._load(step, batch)
        step.replay()
        dtype = next(self.runner.model.parameters()).dtype
        same = agree(step.answer.logits[: len(logits)].to(dtype), logits.to(dtype))
        step.agreed += same
        return same

    def _distrust(self, shape: Shape, step: _CapturedStep) -> None:
        """A replay differs from the forward itself. If it is compiled code that does, none of it is used any
        more.
        """
        if not step.compiled:
            raise NotCapturable("its replay differs from the forward itself")
        assert self.compilation is not None
        self.compilation.give_up("what they compute differs from the forward itself")
        self._steps = {shape: step for shape, step in self._steps.items() if not step.compiled}

    def _capture(self, shape: Shape, batch: ForwardBatch, vocabulary: int) -> _CapturedStep:
        model, groups = self.runner.model, self.runner.pools.groups
        rows, device, mixed = shape.rows, self.runner.device, shape.form != "single"
        batches = {kind: self._batch(shape, group) for kind, group in groups.items()}
        with torch.inference_mode(False):
            ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
            places = torch.zeros(self._most, dtype=torch.long, device=device) if mixed else None
            shift = torch.zeros(rows, dtype=torch.long, device=device) if self.moves else None
        if self._answer is None or self._answer.logits.shape[1] != vocabulary:
            self._answer = place_for(self._most, vocabulary, device)
        answer = self._answer.first(self._most if mixed else rows)
        step = _CapturedStep(
            ids, places, batches, self._state(), self._pools(), shape.form == "spans", answer, shift
        )
        if not step.state.steady:
            raise NotCapturable("somebody's hooks run in the model")
        fusion = Fusion(model, next(iter(groups.values())).captured_ops.kernels)
        self._load(step, batch)
        self._rehearse(step, fusion, shape.form)
        lengths = self._rehearsed[shape.form]
        compiled = self._compiled(step, fusion, batch)
        if self._state() != step.state:
            raise NotCapturable("the model's forward changes the model")
        self._load(step, batch)
        if device.type == "cuda" and self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        step.replay, _ = RECORDERS[device.type](
            partial(self._forward, step, compiled or fusion, lengths), self._pool, device
        )
        step.compiled = compiled is not None
        self._steps[shape] = step
        self.counts["captured"] += 1
        if step.compiled:
            self.counts["compiled"] += 1
        return step

    def _rehearse(self, step: _CapturedStep, fusion: Fusion, form: Form) -> None:
        """Run the step outside its graph: what is compiled for so many rows is. The first of a form is
        watched, which takes long.

        Others of the form run the same code on other sizes. What must not be captured there either does not
        depend on them, or fails in the capture itself: whatever the host waits for.
        """
        if form in self._rehearsed:
            self._forward(step, fusion, self._rehearsed[form])
            return
        model, lengths = self.runner.model, LengthsOnDevice()
        stores = [data for group in self.runner.pools.groups.values() for data in group.tensors]
        static = [
            step.ids,
            *(each for each in step.answer if each is not None),
            *(tensor for batch in step.batches.values() for tensor in batch.tensors),
        ]
        static += [each for each in (step.places, step.shift) if each is not None]
        with Rehearsal(self.runner.device, [*model.parameters(), *model.buffers(), *static, *stores]):
            self._forward(step, fusion, lengths)
        self._rehearsed[form] = lengths if lengths.met else None

    def _compiled(
        self,
        step: _CapturedStep,
        fusion: Fusion,
        batch: ForwardBatch,
    ) -> CompiledFusion | None:
        """The step with compiled layers, run once; None if they are not wanted, or cannot be had."""
        if self.compilation is None or self.compilation.why_not is not None:
            return None
        try:
            made = CompiledFusion(
                self.runner.model, fusion.kernels, self.compilation, self.runner.cache.layers
            )
            self._load(step, batch)
            self._forward(step, made, LengthsOnDevice())
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.compilation.give_up(reason_of(error))
            return None
        return made

    def _batch(self, shape: Shape, group: LayerGroup) -> StaticBatch:
        rows, width, form = shape
        arguments = width, group.pool.block_size, width, group.device, group.kind.window
        return (
            StaticSpans(rows, self._most, *arguments) if form == "spans" else StaticBatch(rows, 1, *arguments)
        )

    def _forward(self, step: _CapturedStep, fusion: Fusion, lengths: LengthsOnDevice | None) -> None:
        """What is captured: the step of all rows, each at its own position, and the logits of those that are
        wanted.
        """
        with fused(fusion), lengths_on_device(self.runner.model, lengths):
            self.runner.plugged(partial(self._run, step))

    def _run(self, step: _CapturedStep) -> None:
        runner = self.runner
        sequences = runner.cache.sequences
        sequences.static = step.batches
        outer = running.get()
        try:
            running.set(Forward(runner.cache))
            for kind, batch in step.batches.items():
                batch.begin(runner.pools.groups[kind].captured_ops)
            seen = next(iter(step.batches.values())).seen
            positions = seen.long() - 1 if step.shift is None else seen.long() - 1 + step.shift
            arguments = {"input_ids": step.ids, "position_ids": positions.clamp(min=0)[:, None]}
            if runner.keeps_some:
                arguments["logits_to_keep"] = 1  # type: ignore[assignment]  # a number among tensors
            answer = runner.model(**arguments, past_key_values=runner.cache, use_cache=True, return_dict=True)
            logits: torch.Tensor = answer.logits[:, -1]
            step.answer.enter(logits if step.places is None else logits.index_select(0, step.places))
        finally:
            running.set(outer)
            sequences.static = None
