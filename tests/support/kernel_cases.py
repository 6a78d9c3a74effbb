"""Shared by the tests: Case, DEVICE, GPU, assert_close, assert_replays, ints, load."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

GPU = torch.cuda.is_available()


DEVICE = "cuda" if GPU else "cpu"


FOLDER = Path(__file__).parents[2] / "kernels" / "hf_paged_kernels"


TOLERANCE = {torch.float32: 3e-5 if GPU else 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


LOSSES = {torch.float32: 1e-5 if GPU else 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def load() -> ModuleType:
    """The kernels: compiled where there is a GPU, else interpreted, over a copy of Triton of their own.

    Triton decides at its own import whether its functions are interpreted, and transformers may have imported
    it long ago.
    """
    name = "hf_paged_kernels" if GPU else "hf_paged_kernels_interpreted"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
        )
        sys.modules[name] = importlib.util.module_from_spec(spec)
        with nullcontext() if GPU else _interpreted_triton():
            spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def assert_replays(
    graph: torch.cuda.CUDAGraph,
    given: torch.Tensor,
    answer: torch.Tensor,
    cases: Sequence[tuple[torch.Tensor, torch.Tensor]],
    times: int,
) -> None:
    """So many replays of a graph have the bits of each case, (input, answer), in turn."""
    wrong = torch.zeros((), dtype=torch.long, device=answer.device)
    for i in range(times):
        x, expected = cases[i % len(cases)]
        given.copy_(x)
        graph.replay()
        wrong += (answer != expected).any()
    assert not wrong.item()


@contextmanager
def _interpreted_triton() -> Iterator[None]:
    """Import Triton anew for what is imported inside; everybody else keeps theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        theirs = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_triton(name)}
        try:
            yield
            _patch_once(sys.modules["triton.runtime.interpreter"])
        finally:
            for name in [name for name in sys.modules if _is_triton(name)]:
                del sys.modules[name]
            sys.modules.update(theirs)


def _patch_once(interpreter: Any) -> None:
    """The interpreter replaces Triton's builtins for every launch, and again for every call of a function within one:
    a third of the time. This copy of Triton is interpreted for good.
    """
    language, builder = interpreter.tl, interpreter.interpreter_builder
    # tensors are on the host: else each launch copies their whole storages onto themselves, a fifth of the time
    interpreter.GridExecutor._init_args_hst = lambda self, args, options: (args, options)
    interpreter.GridExecutor._restore_args_dev = lambda self, *given: None
    interpreter.inspect = SimpleNamespace(
        **{**vars(inspect), "getfullargspec": _spec, "getcallargs": _arguments}
    )
    interpreter._patch_attr = _set_builtin(interpreter.interpreter_semantic)
    interpreter._patch_lang(FunctionType((lambda: None).__code__, {"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    # sums of integers are computed again in 64 bits for an assertion that is off without debug=True
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    _remember(interpreter)


_spec = functools.cache(inspect.getfullargspec)


def _arguments(function: Any, *given: Any, **options: Any) -> dict[str, Any]:
    """inspect.getcallargs(), for calls that give every argument without a look at the signature."""
    names = _spec(function).args
    found = {**dict(zip(names, given, strict=False)), **options}
    alike = len(found) == len(names) == len(given) + len(options)
    return found if alike else inspect.getcallargs(function, *given, **options)


def _set_builtin(semantic: Any) -> Callable[..., None]:
    """The interpreter's way to replace a builtin, without a copy of the keywords and a second function per call."""

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def interpreted(*given: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*given, **options)

        scope.set_attr(obj, name, interpreted)

    return patch


def _remember(interpreter: Any) -> None:
    """Shapes, names and dtypes of values are found out once for each type, and not for every value: another third."""
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    dtypes, blocks, tensors, shapes = {}, {}, {}, {}
    make_block, make_tensor, dtype_of, equal, broadcast = (
        core.block_type.__init__,
        core.tensor.__init__,
        interpreter._get_np_dtype,
        core.dtype.__eq__,
        semantic.broadcast_impl_value,
    )

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in blocks:
            make_block(self, element_ty, shape)
            self.shape = shapes.setdefault(key[1:], self.shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = {key: value for key, value in vars(self).items() if key != "handle"}
        vars(self).update(tensors[type.name], handle=handle)

    def np_dtype(type: Any) -> Any:
        if type.name not in dtypes:
            dtypes[type.name] = dtype_of(type)
        return dtypes[type.name]

    def broadcast_impl_value(self: Any, one: Any, other: Any) -> Any:
        return (one, other) if one.shape is other.shape else broadcast(self, one, other)

    def checked(self: Any) -> None:
        key = self.data.dtype.num, self.dtype.name
        if key not in sizes:
            check(self)
            sizes.add(key)

    handle = interpreter.TensorHandle
    check, sizes = handle.__post_init__, set()
    handle.__post_init__ = checked
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    semantic.broadcast_impl_value = broadcast_impl_value
    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    interpreter._get_np_dtype = np_dtype


def _is_triton(name: str) -> bool:
    # The compiled part cannot be loaded twice in a process, and need not be.
    return name.split(".")[0] == "triton" and not name.startswith("triton._C.")


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@dataclass
class Case:
    """One layer of a cache and what is asked of it. Whatever may not be read is NaN."""

    lengths: list[int]
    """Tokens of a row."""
    queries: list[int] | None = None
    """Query tokens of a row, its last ones; None: one each, as in decoding."""
    heads: int = 2
    group: int = 2
    key_dim: int = 64
    value_dim: int = 0
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    starts: list[int] | None = None
    window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False
    causal: bool = True
    by_head: bool = False
    """True if the pool lies head by head, keys and values of a block together; else token by token."""
    spare: int = 3
    """Blocks that nobody uses, before those in use."""
    seed: int = 0
    query: torch.Tensor = field(init=False)
    keys: torch.Tensor = field(init=False)
    values: torch.Tensor = field(init=False)
    table: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.value_dim = self.value_dim or self.key_dim
        self.random = torch.Generator(DEVICE).manual_seed(self.seed)
        counts = self.queries or [1] * len(self.lengths)
        self.query = self.normal(sum(counts), self.heads * self.group, self.key_dim)
        self.sinks = self.normal(self.heads * self.group, dtype=torch.float32) if self.with_sinks else None
        self._place()

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random, device=DEVICE).to(dtype or self.dtype)

    def _place(self) -> None:
        needs = [-(-length // self.block_size) for length in self.lengths]
        blocks = self.spare + sum(needs)
        self.keys, self.values = self._pool(blocks)
        order = (
            torch.randperm(sum(needs), generator=torch.Generator().manual_seed(self.seed)) + self.spare
        ).tolist()
        table = torch.zeros(len(needs), max([*needs, 1]), dtype=torch.int32)
        for row, (length, count) in enumerate(
            zip(self.lengths, self.queries or [1] * len(needs), strict=True)
        ):
            mine = [order.pop() for _ in range(needs[row])]
            table[row, : needs[row]] = torch.tensor(mine, dtype=torch.int32)
            token = torch.arange(self.first_seen(row, length - count), length)
            block, inside = (
                torch.tensor(mine, dtype=torch.long)[token // self.block_size].to(DEVICE),
                (token % self.block_size).to(DEVICE),
            )
            self.keys[block, inside] = self.normal(len(token), self.heads, self.key_dim)
            self.values[block, inside] = self.normal(len(token), self.heads, self.value_dim)
        self.table = table.to(DEVICE)

    def _pool(self, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (blocks, self.block_size, self.heads)
        if not self.by_head:
            return tuple(
                torch.full((*shape, dim), torch.nan, dtype=self.dtype, device=DEVICE)
                for dim in (self.key_dim, self.value_dim)
            )
        pool = torch.full(
            (2, blocks, 2, self.heads, self.block_size, self.key_dim),
            torch.nan,
            dtype=self.dtype,
            device=DEVICE,
        )
        return pool[1, :, 0].transpose(1, 2), pool[1, :, 1].transpose(1, 2)

    def first_seen(self, row: int, at: int) -> int:
        """The first token that the query token at place `at` of the row sees."""
        start = self.starts[row] if self.starts else 0
        return start if self.window is None else max(start, at - self.window + 1)

    def expected(self) -> torch.Tensor:
        """softmax(...) values in float64, [query tokens, query heads, value_dim]."""
        out, done = [], 0
        for row, (length, count) in enumerate(
            zip(self.lengths, self.queries or [1] * len(self.lengths), strict=True)
        ):
            token = torch.arange(length, device=DEVICE)
            block, inside = self.table[row].long()[token // self.block_size], token % self.block_size
            k, v = (
                self.keys[block, inside].double().nan_to_num(),
                self.values[block, inside].double().nan_to_num(),
            )
            q = self.query[done : done + count].double().unflatten(1, (self.heads, self.group))
            at = (
                torch.arange(length - count, length, device=DEVICE)
                if self.causal
                else torch.full((count,), length - 1, device=DEVICE)
            )
            out.append(self._row(q, k, v, at, token, row).flatten(1, 2))
            done += count
        return torch.cat(out)

    def _row(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        at: torch.Tensor,
        token: torch.Tensor,
        row: int,
    ) -> torch.Tensor:
        scores = torch.einsum("qhgd,thd->hgqt", q, k) * self.key_dim**-0.5
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        seen = (token <= at[:, None]) & (token >= (self.starts[row] if self.starts else 0))
        if self.window is not None:
            seen &= token > at[:, None] - self.window
        scores = scores.masked_fill(~seen, -torch.inf)
        top = (
            scores.amax(-1, keepdim=True).clamp(min=-1e30)
            if len(token)
            else scores.new_full((*scores.shape[:3], 1), -1e30)
        )
        sink = 0.0
        if self.sinks is not None:
            sinks = self.sinks.double().view(self.heads, self.group, 1, 1)
            top = torch.maximum(top, sinks)
            sink = torch.exp(sinks - top)
        weights = torch.exp(scores - top)
        weights = weights / (weights.sum(-1, keepdim=True) + sink).clamp(min=1e-300)
        return torch.einsum("hgqt,thd->qhgd", weights, v)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Every head's answer within its dtype's rounding of the reference, by norm; what should be 0 is 0."""
    assert got.shape == expected.shape
    error = (got.double() - expected).norm(dim=-1)
    size = expected.norm(dim=-1)
    assert (error <= TOLERANCE[got.dtype] * size.clamp(min=0.05)).all(), (
        f"worst error {(error / size.clamp(min=0.05)).max():.2e}"
    )
    assert got[size == 0].count_nonzero() == 0
    if size.norm() > 0:
        assert error.norm() / size.norm() <= LOSSES[got.dtype]
