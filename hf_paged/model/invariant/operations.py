"""Below autograd: products, sums and functions in fixed orders."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...kv.ops import invariant_kernels
from ...kv.reference import invariant
from .functions import FunctionCalls
from .known import AFTER, EXACT, FUNCTIONS, MOVES, OPTIMIZERS, RANDOM, REAL, NotInvariant, kernels_for

Operation = Callable[..., Any]


class Operations(TorchDispatchMode):
    """Computes what sums or rounds in orders of its own; what does neither passes."""

    def __init__(self, functions: FunctionCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.functions = functions
        functions.hidden_from = self
        self._again = False
        self._known: dict[Any, Operation] = {}
        self._own: dict[str, Operation] = {
            **{name: partial(self._mapped, name) for name in FUNCTIONS},
            "mm": self._mm, "bmm": self._bmm, "addmm": partial(self._added, self._mm),
            "baddbmm": partial(self._added, self._bmm), "linear": self._linear,
            "_grouped_mm": self._grouped_mm, "sum": self._sum, "mean": self._mean, "var": self._var,
            "linalg_vector_norm": self._linalg_vector_norm, "logsumexp": self._logsumexp,
            "native_layer_norm": self._native_layer_norm, "polar": self._polar, "gelu": self._gelu,
            "softplus": self._softplus, "pow": self._pow, "div": self._div, "cumsum": self._cumsum,
            "index_add": self._index_add,
            **{f"_{kind}": partial(self._normalized, kind) for kind in ("softmax", "log_softmax")},
            "mv": lambda one, two: self._bmm(one[None], two[None, :, None])[0, :, 0],
            "dot": lambda one, two: self._bmm(one[None, None], two[None, :, None])[0, 0, 0],
            "nansum": lambda x, *of, **to: self._sum(x.masked_fill(x.isnan(), 0), *of, **to),
            "std": lambda x, *of, **to: self._var(_wide(x), *of, **to).sqrt().to(x.dtype),
            "rsub": lambda x, other, alpha=1: -(x if alpha == 1 else x * alpha) + other,
            "addcmul": lambda x, one, two, value=1: x + one * two * value,
            "addcdiv": lambda x, one, two, value=1: x + one / two * value,
            "lerp": lambda x, end, weight: x + (end - x) * weight,
            **{name: partial(_of_real, getattr(torch, name)) for name in REAL},
        }  # fmt: skip

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its guard, around each operation, takes longer than the rest of the mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._current_autograd_node() is not None:  # gradients are not promised
            again = self.functions.entered and torch.is_grad_enabled()
            if again and not self._again:
                # A checkpointed layer is computed again. Torch has left the other mode, until the node ends.
                torch._C._push_on_torch_function_stack(self.functions)
            self._again = again
            return func(*args, **kwargs)
        if not invariant.get():
            return func(*args, **kwargs)
        operation = self._known.get(func) or self._known.setdefault(func, self._find(func))
        try:
            return operation(*args, **kwargs)
        except NotInvariant:
            if any(getattr(each, "is_meta", False) for each in tree_leaves((args, kwargs))):
                return func(*args, **kwargs)  # a model that is being loaded: shapes without numbers
            raise

    def _find(self, func: Any) -> Operation:
        """Our operation for torch's, or its own."""
        name = func._overloadpacket.__name__ if func.namespace == "aten" else func.name()
        plain = name.rstrip("_") if not name.startswith("__") else name.strip("_")
        operation: Operation = func
        passes = plain in MOVES or plain in RANDOM or plain in AFTER
        if plain == "index_put":
            return partial(_index_put, func)
        if passes or func.namespace == "prim" or name.startswith(OPTIMIZERS):
            return operation
        if plain in EXACT:
            return self._rounded_once(func) if plain in ("add", "sub", "mul") else operation
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        if composite and plain != "linear":
            return self._by_parts(func)
        own = self._own.get(plain)
        return self._unless_floating(func) if own is None else _writing(func, own)

    def _by_parts(self, func: Any) -> Operation:
        def parts(*args: Any, **kwargs: Any) -> Any:
            with self:
                return func.decompose(*args, **kwargs)

        return parts

    @staticmethod
    def _rounded_once(func: Any) -> Operation:
        """Sums with a factor, and products of complex numbers. They are rounded once in some places and twice
        in others; here twice in all.
        """
        if func._overloadpacket.__name__.rstrip("_") != "mul":
            return lambda one, two, alpha=1, **out: func(
                one, two if alpha == 1 else _product(two, alpha), **out
            )
        by_terms = _writing(func, _product)
        return lambda one, two, **out: (by_terms if one.is_complex() else func)(one, two, **out)

    @staticmethod
    def _unless_floating(func: Any) -> Operation:
        def whole(*args: Any, **kwargs: Any) -> Any:
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, torch.Tensor) and (each.is_floating_point() or each.is_complex()):
                    raise NotInvariant(
                        f"batch_invariant() has no fixed order for {func}; run this model without it"
                    )
            return func(*args, **kwargs)

        return whole

    # ---- products

    def _mm(self, one: torch.Tensor, two: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Rows one [rows, depth] by a layer's weight two [depth, columns], plus bias [columns]."""
        kernels = kernels_for(one)
        if not one.is_floating_point():
            return torch.mm(one, two)
        answer: torch.Tensor = kernels.mm(one, two, bias)
        return answer

    def _bmm(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        """Products of what tokens make of each other: a masked one adds zeros."""
        kernels = kernels_for(one)
        if not one.is_floating_point():
            return torch.bmm(one, two)
        answer: torch.Tensor = kernels.bmm(one, two)
        return answer

    @staticmethod
    def _added(multiply: Operation, bias: Any, one: Any, two: Any, beta: float = 1, alpha: float = 1) -> Any:
        """A product and a bias, which may be anything if it counts for nothing."""
        if bias.dim() == 1 and one.dim() == 2 and beta == alpha == 1:
            return multiply(one, two, bias.expand(two.shape[1]))
        product = multiply(one, two) * alpha
        return product if beta == 0 else bias * beta + product

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        flat = x.reshape(x.numel() // max(1, x.shape[-1]), x.shape[-1])
        return self._mm(flat, weight.t(), bias).view(*x.shape[:-1], len(weight))

    def _grouped_mm(
        self, one: torch.Tensor, two: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
    ) -> torch.Tensor:
        """Rows of `one` [rows, depth] by experts two [experts, depth, columns]; offs: each one's end."""
        by_experts = one.dim() == 2 and two.dim() == 3 and offs is not None
        if not by_experts or bias is not None or out_dtype not in (None, one.dtype):
            raise NotInvariant("batch_invariant() supports grouped products of rows by experts only")
        answer: torch.Tensor = kernels_for(one).grouped(one, two, offs)
        return answer

    # ---- sums

    def _rows(self, kind: str, x: torch.Tensor, dims: Any, keepdim: bool) -> torch.Tensor:
        """Sums, means or logsumexps over `dims` of x, in float32; the sums of kind "cumsum" in float64."""
        count = x.dim()
        kernels = kernels_for(x)
        if count and dims in (-1, [-1]) and x.is_contiguous() and x.numel() and kind != "cumsum":
            found: torch.Tensor = kernels.rows(kind, x.float().view(-1, x.shape[-1]))
            return found.view(*x.shape[:-1], 1) if keepdim else found.view(x.shape[:-1])
        asked = [dims] if isinstance(dims, int) else dims or range(count)
        over = sorted({dim % count for dim in asked}) if count else []
        if not x.numel():
            named = "sum" if kind == "cumsum" else kind
            empty: torch.Tensor = getattr(torch, named)(x.float(), over, keepdim)
            return empty
        kept = [dim for dim in range(count) if dim not in over]
        rows = x.permute([*kept, *over]).reshape(-1, math.prod(x.shape[dim] for dim in over))
        wide = kind == "cumsum"
        found = self._cumsum(rows.double(), 1)[:, -1] if wide else kernels.rows(kind, rows.float())
        return found.view(
            [1 if dim in over else x.shape[dim] for dim in range(count) if keepdim or dim in kept]
        )

    def _sum(
        self, x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        wanted = dtype or x.dtype
        if not (x.is_complex() or x.is_floating_point() or wanted.is_floating_point):
            return torch.sum(x, dim, keepdim, dtype=dtype)
        kind = "cumsum" if dtype == torch.float64 else "sum"
        return self._rows(kind, x, dim, keepdim).to(wanted)

    def _mean(
        self, x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if x.is_cuda and wide == torch.float32:
            return self._rows("mean", x, dim, keepdim).to(dtype or x.dtype)
        total = self._sum(x, dim, keepdim, dtype=wide)
        return (total / (x.numel() / max(1, total.numel()))).to(dtype or x.dtype)

    def _var(
        self, x: torch.Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
    ) -> torch.Tensor:
        middle = self._rows("sum", x, dim, True)
        width = x.numel() / max(1, middle.numel())
        total = self._rows("sum", (x.float() - middle / width).square(), dim, keepdim)
        return (total / (width - (1 if correction is None else correction))).to(x.dtype)

    def _linalg_vector_norm(
        self, x: torch.Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> torch.Tensor:
        if ord not in (1, 2):
            raise NotInvariant(f"batch_invariant() supports norms of order 1 and 2 only, got {ord}")
        wide = _wide(x.to(dtype or x.dtype))
        total = self._rows("sum", wide.abs() if ord == 1 else wide.square(), dim, keepdim)
        return (total if ord == 1 else total.sqrt()).to(dtype or x.dtype)

    def _logsumexp(self, x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
        found = self._rows("logsumexp", x, dim, keepdim)
        return found.to(x.dtype) if x.is_floating_point() else found

    def _cumsum(self, x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        if not x.is_cuda or not x.is_floating_point() or not x.dim():
            return torch.cumsum(x, dim, dtype=dtype)  # one number after the other
        wide = x.dtype == torch.float64 or dtype == torch.float64
        moved = x.to(torch.float64 if wide else torch.float32).movedim(dim, -1)
        width = moved.shape[-1]
        rows = moved.reshape(x.numel() // max(1, width), width)
        found: torch.Tensor = invariant_kernels("cuda").rows("cumsum", rows)
        return found.view(moved.shape).movedim(-1, dim).to(dtype or x.dtype)

    @staticmethod
    def _index_add(
        x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
    ) -> torch.Tensor:
        """Sums at a place are of one token's numbers, one index after the other."""
        if not x.is_cuda:
            return torch.index_add(x, dim, index, source, alpha=alpha)
        added = (source if alpha == 1 else source * alpha).movedim(dim, 0)
        return x.movedim(dim, 0).index_put((index,), added, accumulate=True).movedim(0, dim)

    def _normalized(self, kind: str, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        """A log_softmax is x - logsumexp(x): both ways to compute it have the same bits."""
        kernels = kernels_for(x)
        if not x.dim():
            return self._normalized(kind, x[None], 0, half_to_float)[0]
        moved = x.float().movedim(dim, -1)
        width = moved.shape[-1]
        found: torch.Tensor = kernels.rows(kind, moved.reshape(x.numel() // max(1, width), width))
        return found.view(moved.shape).movedim(-1, dim).to(torch.float32 if half_to_float else x.dtype)

    def _native_layer_norm(
        self, x: torch.Tensor, normalized_shape: list[int], weight: Any, bias: Any, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        over = list(range(-len(normalized_shape), 0))
        wide = _wide(x)
        middle = self._mean(wide, over, True)
        off = wide - middle
        scale = (self._mean(off.square(), over, True) + eps).rsqrt()
        answer = off * scale
        if weight is not None:
            answer = answer * weight.float()
        if bias is not None:
            answer = answer + bias.float()
        return answer.to(x.dtype), middle.to(x.dtype), scale.to(x.dtype)

    # ---- functions of one number

    def _mapped(self, kind: str, x: torch.Tensor, parameter: float = 0.0) -> torch.Tensor:
        kernels = kernels_for(x)
        floats = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        answer: torch.Tensor = kernels.mapped(kind, floats, parameter)
        return answer.view(x.shape)

    def _polar(self, size: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        return torch.complex(size * self._mapped("cos", angle), size * self._mapped("sin", angle))

    def _gelu(self, x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
        return self._mapped("gelu" if approximate == "none" else "gelu_tanh", x)

    def _softplus(self, x: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
        if beta != 1 or threshold != 20:
            raise NotInvariant(
                f"batch_invariant() supports softplus of beta 1 and threshold 20, got {beta}, {threshold}"
            )
        return self._mapped("softplus", x)

    @staticmethod
    def _div(one: Any, two: Any, *, rounding_mode: str | None = None) -> torch.Tensor:
        """A quotient, rounded once: a CUDA device multiplies by the reciprocal of what is no tensor of its
        own.
        """
        if one.is_complex() or _is_complex(two):
            raise NotInvariant("batch_invariant() has no fixed order for quotients of complex numbers")
        number = not isinstance(two, torch.Tensor) or (two.dim() == 0 and not two.is_cuda)
        wanted = torch.result_type(one, two) if number else None
        if wanted is None or not one.is_cuda or rounding_mode is not None or wanted == torch.float64:
            return torch.div(one, two, rounding_mode=rounding_mode)
        floats = wanted if wanted.is_floating_point else torch.get_default_dtype()
        divisor = torch.full((), float(two), dtype=torch.float32, device=one.device)
        answer: torch.Tensor = (one.float() / divisor).to(floats)
        return answer

    def _pow(self, x: Any, exponent: Any) -> torch.Tensor:
        wanted = torch.result_type(x, exponent)
        if not wanted.is_floating_point and not wanted.is_complex:
            return torch.pow(x, exponent)
        if isinstance(exponent, torch.Tensor):
            if exponent.dim() or not isinstance(x, torch.Tensor):
                # Frequencies of rotary embeddings, slopes: rounded from double.
                return torch.pow(x, _wide(exponent.to(wanted)).double()).to(wanted)
            exponent = exponent.item()
        x = x.to(wanted)
        if exponent == 2:
            return _product(x, x)  # type: ignore[no-any-return]
        return self._mapped("pow", x, float(exponent))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """x in float32, if that has all of its digits."""
    kernels_for(x)
    return x.float()


def _is_complex(x: Any) -> bool:
    return isinstance(x, complex) or (isinstance(x, torch.Tensor) and x.is_complex())


def _product(one: Any, two: Any) -> Any:
    """A product, of complex numbers with each term rounded."""
    if not isinstance(one, torch.Tensor) or not one.is_complex() or not _is_complex(two):
        return one * two
    real, imaginary = torch.view_as_real(one.resolve_conj()).unbind(-1)
    others = (
        (two.real, two.imag)
        if isinstance(two, complex)
        else torch.view_as_real(two.resolve_conj()).unbind(-1)
    )
    whole = real * others[0] - imaginary * others[1]
    return torch.complex(whole, real * others[1] + imaginary * others[0])


def _index_put(func: Any, x: torch.Tensor, indices: Any, values: torch.Tensor, add: bool = False) -> Any:
    """Numbers put to their places, or added there one after the other: a CPU's threads add floats in any
    order, and doubles in one.
    """
    if not (add and x.is_cpu and x.dtype == torch.float32):
        return func(x, indices, values, add)
    answer = torch.index_put(x.double(), indices, values.double(), True).float()
    return x.copy_(answer) if func._schema.is_mutable else answer


def _of_real(function: Operation, x: torch.Tensor) -> Any:
    """A function of one real number, rounded once."""
    if x.is_complex():
        raise NotInvariant(f"batch_invariant() has no fixed order for {function.__name__} of {x.dtype}")
    if x.is_cpu and x.dtype in (torch.bfloat16, torch.float16):
        return function(x.float()).to(x.dtype)
    return function(x)


def _writing(func: Any, own: Operation) -> Operation:
    """`own` in place or into `out`, if `func` is of that kind."""
    if not func._schema.is_mutable:
        return own
    into = any(each.is_out for each in func._schema.arguments)

    def write(*args: Any, **kwargs: Any) -> torch.Tensor:
        target: torch.Tensor = kwargs.pop("out") if into else args[0]
        answer: torch.Tensor = own(*args, **kwargs)
        if not torch.can_cast(answer.dtype, target.dtype):
            raise RuntimeError(f"{func} got a tensor of {target.dtype} to write {answer.dtype} to")
        return (target.resize_(answer.shape) if into else target).copy_(answer)

    return write
