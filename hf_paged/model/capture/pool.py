"""The pool of captured steps that generate() and an engine have each one of: which sizes are captured, when,
and how far a new one is trusted.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from ...kv import LayerGroup, Memory, is_out_of_memory
from ...kv.reference import invariant
from ..dispatch import runs_unknown_code
from ..lazy import NotCapturable
from ..lengths import LengthsOnDevice, lengths_on_device
from ..ranks.symmetric_memory import meet, symmetric_memories
from ..ranks.votes import Votes, before_groups_end
from ..rehearsal import RECORDERS, Rehearsal, graph_memory
from ..snapshot import StateKey
from ..weights_digest import PLAIN_TENSORS, memory_of_parts, wraps
from .chains import computed
from .compile import Compilation, CompiledFusion, reason_of
from .fusion import Fusion, changing, fused
from .step import AGREE, CapturedStep, Size, StepSource
from .warmup import compile_chains, foresees_chains

logger = logging.getLogger("hf_paged")

MOST = 48
"""Captured steps that a pool keeps; the least recently used goes first."""
MOST_BYTES = 2**30
"""Bytes of their own that these may have."""
AFTER = 2
"""A size that no captured step can hold is captured when it comes for this time."""
SPARE = 2048
"""Rows by which a captured step may be larger than the step that it holds. Of an 8B model on an H200 a step
of 2,048 rows takes as long as launching one operation by operation.
"""
PADDED = 5_000
"""Rows that a captured step may pad in all before a smaller one is captured: about what a capture costs."""
FORM = 16
"""Rows that holding a step of another form costs as much as."""
LATER = 200
"""Steps until a capture is tried again that found no memory."""
MOST_STATES = 8
"""States of the model whose captured steps are kept."""
MOST_REASONS = 1000


_joined: weakref.WeakSet[CapturePool] = weakref.WeakSet()
"""Pools with votes of their own: captured steps of several ranks have collectives."""


class _Key(NamedTuple):
    state: StateKey
    size: Size


class _Prepared(NamedTuple):
    """A step that is ready to be recorded."""

    step: CapturedStep
    layers: Fusion
    lengths: LengthsOnDevice | None
    known: bool
    """True once its code has been rehearsed."""
    compiled: bool


class _OtherState(RuntimeError):
    """The model has changed since its state was read."""


class Unsteady(NotCapturable):
    """The model's forward changes the model, so that no captured step would stay right."""


class Outcome(IntEnum):
    """How a capture or a comparison ended, the worst first: the worst of any rank counts for all."""

    UNSTEADY = 0
    FAILED = 1
    NO_MEMORY = 2
    OTHER_STATE = 3
    DIFFERS = 4
    DONE = 5


class _OfAnotherRank(NotCapturable):
    """A capture that another rank could not make; how it ended there is how it ends here."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("another rank could not capture it")
        self.outcome = outcome


class _Stretch:
    """A part of a capture, or a comparison, that comes to the same end on all ranks."""

    outcome = Outcome.DONE


def outcome_of(trouble: Exception | None) -> Outcome:
    """The outcome of an error in a capture, or of none."""
    if isinstance(trouble, _OfAnotherRank):
        return trouble.outcome
    if trouble is not None and is_out_of_memory(trouble):
        return Outcome.NO_MEMORY
    kinds = {type(None): Outcome.DONE, Unsteady: Outcome.UNSTEADY, _OtherState: Outcome.OTHER_STATE}
    return kinds.get(type(trouble), Outcome.FAILED)


class CapturePool:
    """Captured steps by the model's state and their sizes.

    A step is answered by the captured step of its size, else by a larger one, else by the forward itself. A
    size is captured when it comes for the second time and nothing can hold it, or when padding has cost about
    as much as a capture; or before, while the device computes a long step. A new captured step is trusted
    after its replays have agreed with AGREE answers of the forward itself or of a captured step that is
    trusted; with one, if another size of the same code has agreed with AGREE and the model is transformers'
    own. It is dropped when a pool that it reads moves, and when others were used more recently and there are
    too many.
    """

    def __init__(
        self,
        memory: Memory,
        most_bytes: int | None = None,
        ready: Callable[[Size], bool] = lambda size: True,
        compilation: Compilation | None = None,
    ) -> None:
        """ready: whether what steps of a size launch is compiled; others are not captured yet."""
        self.counts: Counter[str] = Counter(captured=0, compiled=0, replayed=0, refused=0)
        """How many steps were "captured", "compiled", "replayed", "refused"."""
        self.gathered: Counter[str] = Counter()
        """Why captured steps gather recurrent states, and how often."""
        self.reasons: dict[Hashable, str] = {}
        """Why steps are not captured."""
        self.seconds = 0.0
        """Time that captures have taken."""
        self.unsteady = False
        """True if the model's forward changes the model itself, so that no captured step would stay right."""
        self.compilation = compilation
        self._most_bytes = most_bytes
        self._ready = ready
        self.votes = Votes()
        """Those of the ranks that compute the model: all or none capture a step."""
        self.drops = 0
        """How often steps were dropped: equally often on ranks that have the same ones."""
        self._steps: OrderedDict[_Key, CapturedStep] = OrderedDict()
        self._seen: Counter[_Key] = Counter()
        self._states: list[StateKey] = []
        self._rehearsed: dict[Hashable, LengthsOnDevice | None] = {}
        """Steps that may be captured, by state and code, and how the model counts its cache there."""
        self._launched: set[Hashable] = set()
        """Those of them whose kernels have been launched, for one row or for more."""
        self._proven: set[tuple[StateKey, Hashable, Hashable, bool]] = set()
        """Code, by state, form and whether it is compiled, whose further sizes need one comparison: it is
        transformers' own, and a size of it has agreed with AGREE answers.
        """
        self._workspace: Sequence[Any] = ()
        """The workspace of all captured steps: one runs at a time, its answer read before the next."""
        self._workspace_bytes = 0
        memory.observers.add(self)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[CapturedStep]:
        return iter(self._steps.values())

    def sizes(self) -> list[Size]:
        """The sizes of trusted steps."""
        return [key.size for key, step in self._steps.items() if step.trusted]

    @property
    def bytes(self) -> int:
        """Memory that goes with captured steps."""
        return sum(step.bytes for step in self) + self._workspace_bytes

    def stats(self) -> dict[str, Any]:
        """Counts, how many captured steps there are, their bytes, and the seconds that captures took."""
        return {**self.counts, "kept": len(self), "bytes": self.bytes, "seconds": self.seconds}

    # ---- which captured step holds a step

    def known(self, state: StateKey) -> StateKey:
        """One object for states that are the same; steps of states long ago are dropped."""
        if any(known is state for known in self._states):
            return state
        for known in self._states:
            if known.same(state):
                return known
        self._states.append(state)
        if len(self._states) > MOST_STATES:
            self._forget_state(self._states.pop(0))
        return state

    def _forget_state(self, state: StateKey) -> None:
        self._keep_only(lambda key, step: key.state is not state)
        for key in [key for key in self._seen if key.state is state]:
            del self._seen[key]
        self._proven = {code for code in self._proven if code[0] is not state}

    def find(self, state: StateKey, size: Size, holders: Sequence[Hashable]) -> CapturedStep | None:
        """The trusted step of a size, or the smallest that can hold it; holders: the forms that can."""
        key = _Key(state, size)
        own = self._steps.get(key)
        if own is not None and own.trusted:
            self._steps.move_to_end(key)
            return own
        best = self._smallest(state, size, holders, trusted=True)
        if best is None:
            return None
        self._steps.move_to_end(best)
        self._steps[best].padded += best.size.rows - size.rows + FORM * (best.size.form != size.form)
        return self._steps[best]

    def _smallest(
        self, state: StateKey, size: Size, holders: Sequence[Hashable], trusted: bool
    ) -> _Key | None:
        """The smallest captured step that can hold one of a size, among all or those that are trusted."""
        fits = [
            key
            for key, step in self._steps.items()
            if size.rows <= key.size.rows <= size.rows + SPARE
            and key.size.width >= size.width
            and key.size.form in holders
            and key.size.adapters == size.adapters
            and key.state is state
            and (step.trusted or not trusted)
            and (step.holds_fewer or key.size == size)
        ]
        return min(
            fits, key=lambda key: (key.size.rows, holders.index(key.size.form), key.size.width), default=None
        )

    def holds(self, step: CapturedStep) -> bool:
        """True if a step was not dropped meanwhile: a pool that moves drops those that read it."""
        return any(step is each for each in self)

    def drop(self, group: LayerGroup | None = None) -> None:
        """Drop all captured steps, or those that read the pool of a group, which has moved."""
        self.drops += 1
        if group is None:
            self._steps.clear()
            self._seen.clear()
            self._rehearsed.clear()
            self._launched.clear()
            self._proven.clear()
        else:
            self._keep_only(lambda key, step: group not in step.groups)
        if not self._steps:
            self._workspace_bytes = 0

    def _keep_only(self, wanted: Callable[[_Key, CapturedStep], bool]) -> None:
        self._steps = OrderedDict(item for item in self._steps.items() if wanted(*item))

    # ---- new ones

    def is_due(self, state: StateKey, source: StepSource[Any], stand_in: CapturedStep | None = None) -> bool:
        """True if a step that has its answer is to be captured, or compared with one of its size."""
        key = _Key(state, source.size)
        if self.unsteady or key in self.reasons or not source.repeatable:
            return False
        if self._doubtful(state, source) is not None:
            return True
        if key in self._steps:
            return False
        if len(self._seen) > MOST_REASONS:
            self._seen.clear()
        self._seen[key] += 1
        if self._seen[key] < 0:
            return False
        due = self._seen[key] >= AFTER if stand_in is None else stand_in.padded > PADDED
        return due and source.is_worth_it(self._seen[key]) and self._is_ready_everywhere(source.size)

    def _is_ready_everywhere(self, size: Size) -> bool:
        """True if kernels for steps of a size are compiled, on all ranks if these capture the same steps."""
        ready = self.is_ready(size)
        return ready if self.votes.each_decides else self.worst(ready) > 0

    def may_come_first(self, state: StateKey, source: StepSource[Any]) -> bool:
        """True if a size may be captured before any step has it: its code is known, its kernels compiled, and
        no other has to go for it.
        """
        known = (state, source.code) in self._rehearsed
        return self.votes.alone and known and self.is_ready(source.size) and self.lacks(state, source)

    def is_ready(self, size: Size) -> bool:
        """True if the kernels for steps of a size are compiled."""
        return self._ready(size)

    def lacks(self, state: StateKey, source: StepSource[Any]) -> bool:
        """True if a size is not captured and may be, no other having to go for it."""
        key = _Key(state, source.size)
        compiles = self.compilation is not None and self.compilation.why_not is None
        known = key in self._steps or key in self.reasons or self._seen[key] < 0
        if self.unsteady or compiles or known:
            return False
        return len(self) < MOST and self._room >= max([step.bytes for step in self], default=0)

    def _doubtful(self, state: StateKey, source: StepSource[Any]) -> CapturedStep | None:
        """The smallest captured step that can hold a source's, if it is to be compared still."""
        if not source.comparable:
            return None
        key = self._smallest(state, source.size, source.holders, trusted=False)
        return None if key is None or self._steps[key].trusted else self._steps[key]

    def learn(
        self,
        state: StateKey,
        source: StepSource[Any],
        answer: Any,
        stand_in: CapturedStep | None = None,
        steady: bool = True,
    ) -> None:
        """After a step was answered, by a stand-in or without any: capture or compare it, if that is due.
        steady: whether the model may be captured.
        """
        due = steady and self.is_due(state, source, stand_in)
        step = self._doubtful(state, source)
        if self.on_all_ranks((due, None if step is None else step.size.rows), "the end of a step") and due:
            self.capture_or_compare(state, source, answer, stand_in)

    def on_all_ranks(self, choice: object, place: str) -> bool:
        """True if all ranks do the same with a step, if each decides by itself. If not, all drop their
        captured steps: a capture on one of them alone would compute sums that the others do not.
        """
        same = not self.votes.each_decides or self.votes.same(choice, place)
        if not same:
            self.drop()
        return same

    def agree_on(self, state: StateKey) -> StateKey:
        """The known state, on all ranks together. Where it has changed on some of them only, all drop their
        captured steps: those would compute sums that the others do not.
        """
        if not self.votes.same(self._states.index(state), "a look at the model"):
            self.drop()
            self.reasons.clear()
            self._states = [state]
        return state

    def capture_or_compare(
        self,
        state: StateKey,
        source: StepSource[Any],
        answer: Any,
        stand_in: CapturedStep | None = None,
    ) -> None:
        """Compare a replay of a step that has its answer, by a new captured step if none waits for that.
        Whatever fails here, the step has its answer.
        """
        step = self._doubtful(state, source)
        key = _Key(state, source.size if step is None else step.size)
        begin = time.perf_counter()
        trouble: Exception | None = None
        agreed = False
        try:
            if step is None:
                step = self._capture(key, source)
                if stand_in is not None:
                    stand_in.padded = 0
            if source.comparable:
                agreed = self._agrees(step, source, answer)
        except Exception as error:
            trouble = error
        finally:
            self.seconds += time.perf_counter() - begin
        worst = Outcome(self.worst(outcome_of(trouble)))
        if worst != Outcome.DONE:
            meet(self.votes.model_group())
            self._drop_failed(key, worst, trouble or _OfAnotherRank(worst))
        elif step is not None and agreed:
            self._note_agreement(step, source, state)
        del trouble  # its traceback holds this frame, and with it the step's cache

    def _drop_failed(self, key: _Key, outcome: Outcome, error: Exception) -> None:
        """Drop a step whose capture, or first comparison, has failed."""
        self._steps.pop(key, None)
        self.unsteady |= outcome == Outcome.UNSTEADY
        if outcome == Outcome.NO_MEMORY:
            self._seen[key] = -LATER
        elif outcome != Outcome.OTHER_STATE:
            self._refuse(key, f"{type(error).__name__}: {error}".split("\n")[0])

    def join(self, votes: Votes) -> None:
        """Capture the same steps as the pools of other ranks."""
        self.votes = votes
        _joined.add(self)
        if self._most_bytes is not None:
            self._most_bytes = votes.least(self._most_bytes)

    def _refuse(self, key: Hashable, reason: str) -> None:
        if len(self.reasons) > MOST_REASONS:
            self.reasons.clear()
        self.reasons[key] = reason
        self.counts["refused"] += 1
        logger.info("a decoding step is not captured: %s", reason)

    def _agrees(self, step: CapturedStep, source: StepSource[Any], answer: Any) -> bool:
        """Replay a step whose answer is known. If compiled layers differ, none are used any more."""
        with self._alike() as replay:
            source.load(step)
            step.replay()
            if not source.agrees(step, answer):
                replay.outcome = Outcome.DIFFERS
        if replay.outcome == Outcome.DONE:
            return True
        source.recompute()  # on all ranks, if it differs on one
        if not step.compiled:
            raise NotCapturable("its replay differs from the forward itself")
        assert self.compilation is not None
        self.compilation.give_up("what they compute differs from the forward itself")
        self._keep_only(lambda key, each: not each.compiled)
        return False

    def _note_agreement(self, step: CapturedStep, source: StepSource[Any], state: StateKey) -> None:
        """A replay has agreed, on all ranks if there are several: decide whether the step is trusted."""
        code = state, source.code, step.size.form, step.compiled
        step.agreed += 1
        step.trusted = step.agreed >= AGREE or code in self._proven
        if step.agreed < AGREE:
            return
        outcome = Outcome.DIFFERS if runs_unknown_code(source.model) else Outcome.DONE
        if self.worst(outcome, computed=False) == Outcome.DONE:
            if len(self._proven) > MOST_REASONS:
                self._proven.clear()
            self._proven.add(code)

    def worst(self, outcome: int, computed: bool = True) -> int:
        """The worst outcome of all ranks. computed: whether the model computes before it; a recording does
        not.
        """
        return self.votes.least(outcome, computed)

    @contextmanager
    def _alike(self, computed: bool = True) -> Iterator[_Stretch]:
        """A stretch that raises on all ranks if it does on one; behind it its outcome is the worst of all."""
        stretch = _Stretch()
        try:
            yield stretch
        except Exception as error:
            self.worst(outcome_of(error), computed)
            raise
        stretch.outcome = Outcome(self.worst(stretch.outcome, computed))
        if stretch.outcome < Outcome.DIFFERS:
            raise _OfAnotherRank(stretch.outcome)

    def _capture(self, key: _Key, source: StepSource[Any]) -> CapturedStep:
        """Capture a step that has its answer already, on all ranks: none replays what another lacks."""
        with self._in_turn():
            with self._alike(computed=False):
                if not source.snapshot().steady:  # on this rank: no other begins to compute, either
                    raise NotCapturable(
                        "hooks that are not transformers' own, or active dropout, run in the model"
                    )
                fusion = Fusion(source.model, source.groups[0].captured_ops.kernels)
                digest = fusion.digest(source.model)
            if not self.votes.same(digest, "a capture"):  # they would meet in other sums
                raise NotCapturable(
                    "a forward was replaced on some of the ranks, or other ones than on others"
                )
            with self._alike():
                prepared = self._prepare(key, source, fusion)
            with self._alike(computed=False):
                step = self._record_prepared(key, source, prepared)
            self.gathered += fusion.states.reasons
        return step

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Let no other thread capture meanwhile. Ranks have their turn together, or try again after the next
        step: a rank that waited here for another thread would keep the ranks waiting that this one needs.
        """
        taken = changing.acquire(blocking=self.votes.alone)
        try:
            if self.worst(Outcome.DONE if taken else Outcome.OTHER_STATE) != Outcome.DONE:
                raise _OfAnotherRank(Outcome.OTHER_STATE)
            yield
        finally:
            if taken:
                changing.release()

    def _prepare(self, key: _Key, source: StepSource[Any], fusion: Fusion) -> _Prepared:
        """Compute all that must be computed before a step is recorded."""
        snapshot = source.snapshot()
        model = source.model
        code: Hashable = (key.state, source.code)
        if runs_unknown_code(model):
            code = (code, key.size)
        known = code in self._rehearsed
        launched = code, key.size.rows == 1  # strides of one row are others
        if not known:
            source.compile_ahead(fusion)
        step: CapturedStep = source.prepare()
        step.size = key.size
        step.groups = source.groups
        source.load(step)
        if not known:
            if len(self._rehearsed) > MOST_REASONS:
                self._rehearsed.clear()
                self._launched.clear()
            self._rehearsed[code] = self._rehearse(source, step, fusion)
        elif launched not in self._launched and foresees_chains(source.devices[0], fusion):
            _forward_first(source, step, fusion, self._rehearsed[code], nullcontext())
        self._launched.add(launched)
        compiled = self._compiled(source, step, fusion)
        if not source.snapshot().graph_key.same(snapshot.graph_key):
            raise Unsteady("the model's forward changes the model")
        if not snapshot.graph_key.same(key.state):
            raise _OtherState
        layers = compiled or fusion
        lengths = self._rehearsed[code]
        if known and not self.votes.alone:
            _forward(source, step, layers, lengths)  # not all ranks would fail where one does
        return _Prepared(step, layers, lengths, known, compiled is not None)

    def _record_prepared(self, key: _Key, source: StepSource[Any], ready: _Prepared) -> CapturedStep:
        step, layers, lengths, known, compiled = ready
        reserved = _reserved(source.devices)
        try:
            step.replay, answer = self._record(source, step, layers, lengths)
        except Exception as error:
            if not known or not self.votes.alone or is_out_of_memory(error):
                raise
            # A kernel that no other size has launched cannot be loaded in a capture. What the broken one
            # has put into its step (plans, workspaces) was recorded and never computed.
            broken, step = step, source.prepare()
            step.size, step.groups = broken.size, broken.groups
            source.load(step)
            _forward(source, step, layers, lengths)
            step.replay, answer = self._record(source, step, layers, lengths)
        step.keep(answer)
        step.compiled = compiled
        self._workspace_bytes += max(0, _reserved(source.devices) - reserved)
        self._keep(key, step)
        return step

    def _rehearse(
        self, source: StepSource[Any], step: CapturedStep, fusion: Fusion
    ) -> LengthsOnDevice | None:
        """Run a step outside its graph and watch what it does, which takes long: how it counts its cache.

        Other sizes of transformers' own code are not watched: it branches on the number of rows only where
        the host waits for the device, which fails in the capture itself.
        """
        lengths = LengthsOnDevice()
        stores = [data for group in source.groups for data in group.tensors]
        own = [*source.model.parameters(), *source.snapshot().reads()]  # the former with adapters
        plain = [each for each in own if type(each) in PLAIN_TENSORS or not wraps(each)]
        known = [*plain, *memory_of_parts(own), *step.tensors, *step.shared, *stores, *symmetric_memories()]
        _forward_first(source, step, fusion, lengths, Rehearsal(source.devices, known))
        return lengths if lengths.met else None

    def _record(
        self, source: StepSource[Any], step: CapturedStep, fusion: Fusion, lengths: LengthsOnDevice | None
    ) -> tuple[Callable[[], None], Any]:
        source.load(step)
        run = partial(_forward, source, step, fusion, lengths)
        devices = source.devices
        return RECORDERS[devices[0].type](run, self._shared_workspace(devices), devices)

    def _compiled(self, source: StepSource[Any], step: CapturedStep, fusion: Fusion) -> CompiledFusion | None:
        """The step's layers compiled, and run once; None if they are not wanted, or cannot be had."""
        if self.compilation is None or self.compilation.why_not is not None:
            return None
        if invariant.get():
            self.compilation.give_up("the compiler's code has no order that batch_invariant=True knows")
            return None
        try:
            made = source.compile(fusion)
            if made is not None:
                source.load(step)
                _forward(source, step, made, LengthsOnDevice())
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.compilation.give_up(reason_of(error))
            return None
        return made

    def _shared_workspace(self, devices: Sequence[torch.device]) -> Sequence[Any]:
        if len(self._workspace) != len(devices):
            self._steps.clear()
        if not self._steps:
            self._workspace = graph_memory(devices)  # one whose graphs are all gone is gone
            self._workspace_bytes = 0
        return self._workspace

    def _keep(self, key: _Key, step: CapturedStep) -> None:
        self._steps[key] = step
        self.counts["captured"] += 1
        if step.compiled:
            self.counts["compiled"] += 1
        while len(self._steps) > 1 and (len(self._steps) > MOST or self._room < 0):
            self._steps.popitem(last=False)

    @property
    def _room(self) -> int:
        """The bytes of their own that further steps may have."""
        most = MOST_BYTES if self._most_bytes is None else self._most_bytes
        return most - sum(each.bytes for each in self)


def _drop_joined(ends: dist.ProcessGroup) -> None:
    for pool in list(_joined):
        if pool.votes.model_group() is ends:
            pool.drop()


before_groups_end.append(_drop_joined)


def _forward(
    source: StepSource[Any], step: CapturedStep, fusion: Fusion, lengths: LengthsOnDevice | None
) -> Any:
    """The captured forward."""
    with fused(fusion), lengths_on_device(source.model, lengths):
        return tree_map(computed, source.forward(step))


def _forward_first(
    source: StepSource[Any],
    step: CapturedStep,
    fusion: Fusion,
    lengths: LengthsOnDevice | None,
    watching: AbstractContextManager[Any],
) -> None:
    """Compute a step whose kernels no other has launched. Those of chains are compiled beside each other,
    then launched: a graph's capture can load none. watching: around the forward that finds them.
    """
    device = source.devices[0]
    foresees = foresees_chains(device, fusion)
    with watching, fusion.foreseeing() if foresees else nullcontext() as chains:
        _forward(source, step, fusion, lengths)
    if chains:
        compile_chains(device, fusion, [*chains.values()])
        source.load(step)
        _forward(source, step, fusion, lengths)


def _reserved(devices: Sequence[torch.device]) -> int:
    return sum(torch.cuda.memory_reserved(device) for device in devices if device.type == "cuda")
