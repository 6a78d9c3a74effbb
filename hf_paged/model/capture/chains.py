"""Small operations of a captured forward that follow each other, computed by one kernel.

While the forward runs, operations on single numbers, means along lines, and lines that are put together of
parts are noted instead of computed. What is noted is computed when something else needs it, together with
what it was computed from. So a chain is found by what the modules compute, whatever their code is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from ...kv.ops import on
from ..lazy import LazyTensor
from ..weights_digest import PLAIN_TENSORS

aten = torch.ops.aten
LEAST = 2
"""Operations that are worth a kernel of their own."""
MOST = 48
"""Operations and tensors of one kernel."""
WIDEST = 16384
"""The longest line that the kernel sums."""
SOFTMAX = "softmax"
"""The operation that only the kernel which finds the largest numbers computes along."""
STACK = "stack"
"""The operation that no kernel computes alone: two lines side by side, to be one of twice their length."""
VIEWS = ("slice", "interleave")
"""Operations whose answers torch lays over what they are given."""
PARTS = (*VIEWS, "cat")
LONGEST, LARGEST = 1024, 32
"""The longest line, and the most numbers of it, of the kernel that finds the largest."""
ALIGNED = 16
"""Bytes to whose multiples kernels look whether a tensor begins at one."""
FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


class Recipe(NamedTuple):
    """An operation of torch as the kernel has it."""

    kind: str
    operands: tuple[Any, ...]
    """Tensors, notes and numbers."""


class Note:
    """An operation that is noted, or its answer once it is computed."""

    def __init__(self, run: Callable[[], torch.Tensor], recipe: Recipe, answer: torch.Tensor) -> None:
        """run: computes it alone; answer: a tensor without data of its shape, strides and type."""
        self.device = next(x.device for x in recipe.operands if not isinstance(x, float))
        self.run: Callable[[], torch.Tensor] | None = run
        self.kind = recipe.kind
        self.operands = [each.note if isinstance(each, Noted) else each for each in recipe.operands]
        self.shape = answer.shape
        self.strides = answer.stride()
        self.dtype = answer.dtype
        self.value: torch.Tensor | None = None
        self.tensor: weakref.ref[Noted] | None = None
        """The answer in the forward, while something holds it."""
        self.base: Note | None = None
        """The note whose answer this one is a view of."""
        self.stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    @classmethod
    def of_value(cls, value: torch.Tensor) -> Note:
        """An operation that is computed already."""
        note = cls(lambda: value, Recipe("copy", (value,)), value)
        note.settle(value)
        return note

    def settle(self, value: torch.Tensor) -> None:
        """The answer is computed; nothing that it was computed from is needed any more."""
        self.value = value
        self.run = None
        self.operands = []

    @property
    def waits(self) -> bool:
        return self.value is None

    @property
    def held(self) -> bool:
        """True if the forward may still ask for the answer."""
        return self.tensor is not None and self.tensor() is not None

    @property
    def is_trivial(self) -> bool:
        """True of a product with one, and of a part of a line."""
        ones = self.kind == "mul" and 1.0 in [each for each in self.operands if isinstance(each, float)]
        return ones or self.kind in VIEWS

    @property
    def widens(self) -> bool:
        """True of a cast that loses nothing."""
        return self.kind == "copy" and self.dtype == torch.float32

    def joins(self, later: Note) -> bool:
        """True if the kernel of a later operation can compute this one: a sum, along whole lines of it."""
        if self.kind in (SOFTMAX, STACK):
            return False
        if self.kind in VIEWS:  # what it is a part of is computed, if not with it
            return all(each.joins(later) for each in self.behind() if each.kind not in VIEWS)
        if not self.sums:
            return True
        (of,) = self.operands
        return of.shape == later.shape

    def behind(self) -> list[Note]:
        """The operations that it waits for, each once."""
        found: dict[int, Note] = {}
        todo = [self]
        while todo:
            waiting = [each for each in todo.pop().operands if isinstance(each, Note) and each.waits]
            todo += [each for each in waiting if id(each) not in found]
            found.update((id(each), each) for each in waiting)
        return [*found.values()]

    @property
    def sums(self) -> bool:
        return self.kind in ("sum", "mean")


class Noted(LazyTensor):
    """The answer of an operation that is noted."""

    note: Note
    chains: Chains

    @classmethod
    def of(cls, note: Note, chains: Chains) -> Noted:
        made: Noted = torch.Tensor._make_wrapper_subclass(
            cls, note.shape, strides=note.strides, dtype=note.dtype, device=note.device
        )
        made.note = note
        made.chains = chains
        note.tensor = weakref.ref(made)
        return made

    def _make(self) -> torch.Tensor:
        return self.chains.compute(self.note)

    @property
    def is_read(self) -> bool:
        """True if the forward may have views of the content."""
        return self._dense is not None

    def becomes(self, note: Note) -> Noted:
        """The same tensor with the answer of an operation in place. What was noted of it stays as it was."""
        self.note.tensor = None
        self.note = note
        note.tensor = weakref.ref(self)
        return self


class Chains(TorchDispatchMode):
    """Notes operations of the forward that runs under it, and computes them."""

    def __init__(self, kernels: Any, foreseen: dict[Hashable, Callable[[], object]] | None = None) -> None:
        """foreseen: gets a call of each chain's kernel on tensors without data; torch computes the chains."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = kernels
        self._foreseen = foreseen
        self._meanwhile: dict[Note, torch.Tensor] = {}
        """Answers inside a chain that torch computes."""
        self._noted: list[weakref.ref[Noted]] = []
        self._views: list[weakref.ref[Noted]] = []
        self._computing = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if self._computing:
            return func(*args, **named)
        if args and isinstance(args[0], Noted) and _changes_nothing(func, *args, **named):
            return args[0]
        packet: Any = getattr(func, "overloadpacket", None)
        find = RECIPES.get(IN_PLACE.get(packet, packet))
        if find is not None:
            recipe = find(*args, **named)
            if recipe is not None and _fits(recipe):
                noted = self._note(func, recipe, args, named)
                if noted is not None:
                    return noted
        if func is aten.topk.default:
            largest = self._largest(*args, **named)
            if largest is not None:
                return largest
        if func._schema.is_mutable:  # it may write to what a note will read
            self.compute_all()
        return func(*tree_map(computed, args), **tree_map(computed, named))

    def _note(self, func: Any, recipe: Recipe, args: Any, named: Mapping[str, Any]) -> Noted | None:
        """The answer of an operation, noted. One in place is, of what nothing but a chain has read."""
        target: Any = args[0]
        in_place = IN_PLACE.get(func.overloadpacket)
        if in_place is not None:
            func = getattr(in_place, func._overloadname)
        answer = _answer(func, args, named)
        if in_place is not None and not (
            isinstance(target, Noted)
            and not target.is_read
            and not self._shares(target.note)
            and (answer.shape, answer.stride(), answer.dtype) == (target.shape, target.stride(), target.dtype)
        ):
            return None
        given = tree_map(lambda x: x.note if isinstance(x, Noted) else x, (args, dict(named)))

        def run() -> torch.Tensor:
            positional, by_name = tree_map(lambda x: self.compute(x) if isinstance(x, Note) else x, given)
            made: torch.Tensor = func(*positional, **by_name)
            return made

        note = Note(run, recipe, answer)
        if in_place is not None:
            return target.becomes(note)  # type: ignore[no-any-return]
        noted = Noted.of(note, self)
        self._noted.append(weakref.ref(noted))
        if isinstance(target, Noted) and note.kind in VIEWS:
            note.base = target.note
            self._views.append(weakref.ref(noted))
        return noted

    def _shares(self, note: Note) -> bool:
        """True if a note is a view of another, or the forward holds a view of it."""
        held = [view for each in self._views if (view := each()) is not None]
        self._views = [weakref.ref(view) for view in held]
        return note.base is not None or any(view.note.base is note for view in held)

    def _largest(
        self, x: torch.Tensor, count: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The largest numbers of lines, which routers ask for, by one kernel; None where it has no such."""
        lines = _fits(Recipe("topk", (x,))) and dim in (-1, x.ndim - 1)
        if not lines or not largest or x.shape[-1] > LONGEST or not 0 < count <= min(LARGEST, x.shape[-1]):
            return None
        of_softmax = isinstance(x, Noted) and x.note.waits and x.note.kind == SOFTMAX
        given = x.note.operands[0] if isinstance(x, Noted) and of_softmax else computed(x)
        while isinstance(given, Note) and given.waits and given.widens:
            (given,) = given.operands  # which the kernel reads as fp32
        given = self.compute(given) if isinstance(given, Note) else given
        with self.paused(), on(given.device):
            aten.alias(given)  # lets a mode that watches the forward see what is read
            values, places = self.kernels.top(given.reshape(-1, x.shape[-1]), count, softmax=of_softmax)
            values, places = (each.view(*x.shape[:-1], count) for each in (values, places))
        noted = Noted.of(Note.of_value(values), self)
        self._noted.append(weakref.ref(noted))
        return noted, places

    def compute_all(self) -> None:
        """Compute all that the forward may still ask for."""
        noted, self._noted = self._noted, []
        for each in noted:
            tensor = each()
            if tensor is not None:
                tensor.dense()

    # ---- computing

    def compute(self, note: Note) -> torch.Tensor:
        """The answer of an operation."""
        if note in self._meanwhile:
            return self._meanwhile[note]
        if note.value is None:
            with self.paused(), _on_its_stream(note):
                self._compute(note)
        assert note.value is not None
        return note.value

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing meanwhile: operations are computed, and other modes see them."""
        outer, self._computing = self._computing, True
        try:
            yield
        finally:
            self._computing = outer

    def _compute(self, note: Note) -> None:
        tree = self._tree(note)
        if note.base is not None or sum(not each.is_trivial for each in tree) < LEAST:
            assert note.run is not None
            note.settle(note.run())
            return
        leaves: dict[int, torch.Tensor] = {}
        for each in tree:
            for x in each.operands:
                x = x.value if isinstance(x, Note) else x
                if isinstance(x, torch.Tensor):
                    leaves[id(x)] = x
        parts = any(each.kind in PARTS for each in tree)
        kept = [
            each
            for each in tree
            if each is note or (each.held and each.shape == note.shape and each.base is None)
        ]
        for leaf in leaves.values():
            aten.alias(leaf)  # lets a mode that watches the forward see what is read
        places: dict[int, int] = {key: i for i, key in enumerate(leaves)}
        operations = []
        for i, each in enumerate(tree, len(leaves)):
            operands = [self._operand(x, places) for x in each.operands]
            operations.append(self.kernels.Operation(each.kind, tuple(operands), each.dtype))
            places[id(each)] = i
        with on(note.device):
            made = [torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device=note.device) for x in kept]
            inputs = [_lines(leaf, note.shape, parts) for leaf in leaves.values()]
            outputs = {places[id(x)]: out for x, out in zip(kept, made, strict=True)}
            if self._foreseen is None:
                self.kernels.chain(inputs, operations, outputs)
            else:
                self._foresee(inputs, operations, outputs)
                self._by_torch(tree, dict(zip(kept, made, strict=True)))
        for each, value in zip(kept, made, strict=True):
            each.settle(value)

    def _foresee(
        self, inputs: list[torch.Tensor], operations: list[Any], outputs: Mapping[int, torch.Tensor]
    ) -> None:
        """Note a call of a chain's kernel that compiles it."""
        tensors = [*inputs, *outputs.values()]
        layouts = [(x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNED) for x in tensors]
        given = [_without_data(x) for x in inputs]
        to = {place: _without_data(x) for place, x in outputs.items()}
        call = partial(self.kernels.chain, given, operations, to)
        assert self._foreseen is not None
        self._foreseen.setdefault((*layouts, *operations, *outputs), call)

    def _by_torch(self, tree: list[Note], outputs: Mapping[Note, torch.Tensor]) -> None:
        """Compute a chain one operation after the other. Those without an output wait as behind a kernel."""
        for each in tree:
            assert each.run is not None
            self._meanwhile[each] = each.run()
        for each, out in outputs.items():
            out.copy_(self._meanwhile[each])
        self._meanwhile.clear()

    @staticmethod
    def _operand(x: Any, places: Mapping[int, int]) -> int | float:
        if isinstance(x, Note) and x.value is not None:
            return places[id(x.value)]
        return x if isinstance(x, float) else places[id(x)]

    def _tree(self, note: Note) -> list[Note]:
        """The operations that one kernel computes, each behind its operands. What it cannot have is computed
        before.
        """
        found: dict[int, Note] = {}
        met: set[int] = set()

        def visit(each: Note) -> None:
            met.add(id(each))
            for x in each.operands:
                if isinstance(x, Note) and x.waits and id(x) not in met:
                    if len(met) < MOST and x.joins(note):
                        visit(x)
                    else:
                        self.compute(x)
                if not isinstance(x, float):
                    met.add(id(x))
            found[id(each)] = each

        if note.sums or note.kind in (SOFTMAX, STACK) or note.base is not None:
            found[id(note)] = note
        else:
            visit(note)
        return [each for each in found.values() if each.waits]


def computed(value: Any) -> Any:
    """The content of a noted answer; anything else as it is."""
    return value.dense() if isinstance(value, Noted) else value


def _without_data(x: torch.Tensor) -> torch.Tensor:
    """A tensor without data that lies as x does, with an address of the same alignment."""
    most = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    off = x.data_ptr() % ALIGNED // x.itemsize
    memory = torch.empty(off + most + 1, dtype=x.dtype, device="meta")
    return memory.as_strided(x.shape, x.stride(), off)


def _lines(leaf: torch.Tensor, shape: torch.Size, parts: bool) -> torch.Tensor:
    """A tensor with the lines of a shape, of their length or, in a chain with parts, of its own."""
    if not parts:
        return leaf.expand(shape)
    return leaf.expand(*shape[:-1], leaf.shape[-1] if leaf.ndim else 1)


def _fits(recipe: Recipe) -> bool:
    """True if a kernel can compute it: floats of one device."""
    given = [x for x in recipe.operands if not isinstance(x, (float, Note))]
    if not all(isinstance(x, torch.Tensor) for x in given):
        return False
    return (
        len({x.device for x in recipe.operands if not isinstance(x, float)}) == 1
        and all(
            (type(x) in PLAIN_TENSORS or isinstance(x, Noted))
            and x.dtype in FLOATS
            and x.layout == torch.strided
            and not x.is_meta
            and x.numel()
            for x in given
        )
        and any(len(x.shape) for x in recipe.operands if not isinstance(x, float))
    )


def _answer(func: Any, args: Any, named: Mapping[str, Any]) -> torch.Tensor:
    """The answer of an operation without data, with the shape, strides and type that torch gives it."""

    def without_data(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("meta")
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    with _disable_current_modes():
        answer: torch.Tensor = func(*tree_map(without_data, args), **tree_map(without_data, dict(named)))
    return answer


@contextmanager
def _on_its_stream(note: Note) -> Iterator[None]:
    """The stream on which an operation was noted, for which the current one then waits."""
    if note.stream is None or (outer := torch.cuda.current_stream(note.stream.device)) == note.stream:
        yield
        return
    with torch.cuda.stream(note.stream):
        yield
    outer.wait_stream(note.stream)


# ---- operations of torch


def _unary(kind: str) -> Callable[..., Recipe | None]:
    def find(x: Any, **named: Any) -> Recipe | None:
        return None if named else Recipe(kind, (x,))

    return find


def _binary(kind: str) -> Callable[..., Recipe | None]:
    def find(x: Any, y: Any, *rest: Any, **named: Any) -> Recipe | None:
        return None if rest or named else Recipe(kind, (_operand(x), _operand(y)))

    return find


def _operand(x: Any) -> Any:
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else x


def _divided(x: Any, y: Any, *rest: Any, **named: Any) -> Recipe | None:
    y = _operand(y)
    if rest or named:
        return None
    if isinstance(y, float) and isinstance(x, torch.Tensor) and x.is_cuda and y:
        return Recipe("mul", (x, 1.0 / y))  # as torch does there
    return Recipe("div", (_operand(x), y))


def _reversed(x: Any, y: Any, *rest: Any, **named: Any) -> Recipe | None:
    return None if rest or named else Recipe("sub", (_operand(y), _operand(x)))


def _power(x: Any, exponent: Any) -> Recipe | None:
    kind = POWERS.get(exponent) if isinstance(exponent, (int, float)) else None
    return None if kind is None else Recipe(kind, (x,))


def _waits(x: Any) -> bool:
    """True of what is noted and can be part of a kernel's lines."""
    return isinstance(x, Noted) and x.note.waits and x.note.kind not in (STACK, SOFTMAX)


def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Recipe | None:
    known = all(isinstance(each, int) for each in (start or 0, end or 0))
    if not known or not _waits(x) or dim not in (-1, x.ndim - 1):
        return None
    begin, end, _ = slice(start, end).indices(x.shape[-1])
    several = end - begin > step  # one counts for the whole line where it meets others
    return Recipe("slice", (x, float(begin), float(end), float(step))) if several else None


def _cat(tensors: Any, dim: int = 0) -> Recipe | None:
    if not any(map(_waits, tensors)):
        return None
    tensors = [x for x in tensors if x.numel()]
    if len(tensors) == 1:
        return Recipe("copy", tuple(tensors))
    alike = len({x.dtype for x in tensors}) == 1 and len({x.shape[:-1] for x in tensors}) == 1
    last = dim in (-1, tensors[0].ndim - 1)
    ends = [*accumulate(x.shape[-1] for x in tensors if x.ndim)]
    if not alike or not last or ends[-1] > WIDEST:
        return None
    return Recipe("cat", (*tensors, *map(float, ends[:-1])))


def _stack(tensors: Any, dim: int = 0) -> Recipe | None:
    pair = any(map(_waits, tensors)) and len(tensors) == 2 and dim in (-1, tensors[0].ndim)
    return Recipe(STACK, tuple(tensors)) if pair and len({(x.dtype, x.shape) for x in tensors}) == 1 else None


def _clone(x: Any, *, memory_format: Any = None) -> Recipe | None:
    """Each number twice, as of `repeat_interleave`."""
    twice = type(x) in PLAIN_TENSORS and x.ndim > 1 and x.shape[-1] == 2 and x.stride(-1) == 0
    return Recipe(STACK, (x[..., 0],) * 2) if twice and memory_format == torch.contiguous_format else None


def _view(x: Any, shape: Any) -> Recipe | None:
    """Two lines side by side as one."""
    if not isinstance(x, Noted) or not x.note.waits or x.note.kind != STACK:
        return None
    one = [*x.shape[:-2], 2 * x.shape[-2]]
    joined = len(shape) == len(one) and all(each in (-1, size) for each, size in zip(shape, one, strict=True))
    return Recipe("interleave", tuple(x.note.operands)) if joined and one[-1] <= WIDEST else None


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Recipe | None:
    return Recipe("softplus", (x,)) if (beta, threshold) == (1, 20) else None


def _gelu(x: Any, approximate: str = "none") -> Recipe | None:
    return Recipe({"none": "gelu", "tanh": "gelu_tanh"}[approximate], (x,))


def _clamped(x: Any, least: Any = None, most: Any = None, **named: Any) -> Recipe | None:
    least, most = named.get("min", least), named.get("max", most)
    if isinstance(least, (int, float)) and most is None:
        return Recipe("at_least", (x, float(least)))
    if isinstance(most, (int, float)) and least is None:
        return Recipe("at_most", (x, float(most)))
    if isinstance(least, (int, float)) and isinstance(most, (int, float)) and least <= most:
        return Recipe("clamp", (x, float(least), float(most)))
    return None


def _along(kind: str) -> Callable[..., Recipe | None]:
    def find(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Recipe | None:
        dims = dim if isinstance(dim, (list, tuple)) else [dim]
        last = len(dims) == 1 and dims[0] in (-1, x.ndim - 1)
        wanted = last and keepdim and dtype in (None, x.dtype) and x.dtype == torch.float32
        return Recipe(kind, (x,)) if wanted and 1 <= x.shape[-1] <= WIDEST else None

    return find


def _softmax(x: Any, dim: int, half_to_float: bool) -> Recipe | None:
    last = dim in (-1, x.ndim - 1) and x.ndim > 0
    return Recipe(SOFTMAX, (x,)) if last and (half_to_float or x.dtype == torch.float32) else None


def _cast(x: Any, *rest: Any, **named: Any) -> Recipe | None:
    dtype = _type_alone(x, *rest, **named)
    return Recipe("copy", (x,)) if dtype is not None and dtype != x.dtype else None


def _type_alone(x: Any, dtype: Any = None, *rest: Any, **named: Any) -> torch.dtype | None:
    """The type of `to`, if that is all that it is asked for."""
    dtype = named.pop("dtype", dtype)
    named.pop("non_blocking", None)
    same = {"device": x.device, "layout": torch.strided, "memory_format": torch.preserve_format}
    alone = all(named.pop(name, None) in (None, value) for name, value in same.items())
    return dtype if alone and dtype in FLOATS and not any((*rest, *named.values())) else None


def _changes_nothing(func: Any, x: Noted, *rest: Any, **named: Any) -> bool:
    """True if torch would answer x itself."""
    if func is aten.contiguous.default:
        return x.is_contiguous() and not rest and not named
    return func is aten.to.dtype and _type_alone(x, *rest, **named) == x.dtype


RECIPES: dict[Any, Callable[..., Recipe | None]] = {
    aten.add: _binary("add"),
    aten.sub: _binary("sub"),
    aten.rsub: _reversed,
    aten.mul: _binary("mul"),
    aten.div: _divided,
    aten.neg: _unary("neg"),
    aten.abs: _unary("abs"),
    aten.square: _unary("square"),
    aten.pow: _power,
    aten.reciprocal: _unary("reciprocal"),
    aten.rsqrt: _unary("rsqrt"),
    aten.sqrt: _unary("sqrt"),
    aten.exp: _unary("exp"),
    aten.tanh: _unary("tanh"),
    aten.sigmoid: _unary("sigmoid"),
    aten.relu: _unary("relu"),
    aten.silu: _unary("silu"),
    aten.gelu: _gelu,
    aten.softplus: _softplus,
    aten.clamp: _clamped,
    aten.mean: _along("mean"),
    aten.sum: _along("sum"),
    aten._softmax: _softmax,
    aten._to_copy: _cast,
    aten.to: _cast,
    aten.slice: _slice,
    aten.cat: _cat,
    aten.stack: _stack,
    aten.clone: _clone,
    aten.view: _view,
    aten._unsafe_view: _view,
    aten.reshape: _view,
}
POWERS = {2: "square", 0.5: "sqrt", -0.5: "rsqrt"}
"""Powers that torch computes otherwise."""
IN_PLACE = {aten.add_: aten.add, aten.sub_: aten.sub, aten.mul_: aten.mul, aten.div_: aten.div}
"""Operations in place, and what they put there."""
