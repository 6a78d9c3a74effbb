"""The library's batch-invariant functions on tensors: a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch

from .plan import DTYPES, Library

ROWS = ("sum", "softmax", "log_softmax", "logsumexp")
MAPS = (
    "exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "erf", "softplus", "pow",
    "expm1", "log1p",
)  # fmt: skip


class _ProductStruct(ctypes.Structure):
    """`Product` of invariant.cpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "w", "bias", "out")),
        *((name, c_int64) for name in ("batches", "rows", "columns", "depth")),
        *((name, c_int64) for name in ("x_batch", "x_row", "w_batch", "w_row", "one_by_one")),
        *((name, c_int64) for name in ("dtype", "threads")),
    ]


class _AttentionStruct(ctypes.Structure):
    """`Attention` of invariant.cpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "keys", "values", "mask", "sinks", "out")),
        *((name, c_int64) for name in ("batches", "heads", "group", "tokens", "columns")),
        *((name, c_int64) for name in ("key_dim", "value_dim")),
        *(
            (f"{name}_{of}", c_int64)
            for name in ("query", "key", "value")
            for of in ("batch", "head", "token")
        ),
        *((f"mask_{of}", c_int64) for of in ("kind", "batch", "head", "token", "column")),
        *((name, c_int64) for name in ("causal", "dtype", "threads")),
        *((name, c_float) for name in ("scale", "softcap")),
    ]


def _require_alike(x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """The library reads all as numbers of x."""
    for name, each in others.items():
        if each is not None and each.dtype != x.dtype:
            raise ValueError(f"Invalid dtype of {name}: expected {x.dtype}, got {each.dtype}")


def _dense(data: torch.Tensor) -> torch.Tensor:
    return data if data.stride(-1) == 1 or data.shape[-1] == 1 else data.contiguous()


class InvariantFunctions:
    """The functions of a loaded library whose sums have one order."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def product(
        self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, *, lanes: bool
    ) -> torch.Tensor:
        """x [batches, rows, depth] w [batches, depth, columns] + bias [columns]: [batches, rows, columns].

        lanes: whether a sum runs lane by lane, which is faster; else number by number, where zeros on either
            side change no bit.
        """
        if w.shape[1] != x.shape[2] or w.shape[0] != x.shape[0]:
            raise ValueError(
                f"Invalid shape of w: expected [{x.shape[0]}, {x.shape[2]}, columns], got {[*w.shape]}"
            )
        _require_alike(x, w=w, bias=bias)
        x = _dense(x)
        w = _dense(w.mT if lanes else w)
        bias = None if bias is None else bias.contiguous()
        columns = w.shape[1 if lanes else 2]
        out = torch.empty(*x.shape[:2], columns, dtype=x.dtype, device="cpu")
        call = _ProductStruct(
            x=x.data_ptr(), w=w.data_ptr(), bias=None if bias is None else bias.data_ptr(),
            out=out.data_ptr(), batches=x.shape[0], rows=x.shape[1], columns=columns, depth=x.shape[2],
            x_batch=x.stride(0), x_row=x.stride(1), w_batch=w.stride(0), w_row=w.stride(1),
            one_by_one=not lanes, dtype=DTYPES[x.dtype], threads=torch.get_num_threads(),
        )  # fmt: skip
        if out.numel():
            self.library.product(ctypes.addressof(call))
        return out

    def mm(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, depth] by a layer's weight w [depth, columns], plus bias [columns]: [rows, columns]. A
        weight is always kept the same way, so its sums always run the same way.
        """
        return self.product(x[None], w[None], bias, lanes=w.stride(0) == 1)[0]

    def bmm(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x [batches, rows, depth] w [batches, depth, columns]; zeros on either side of the others change no
        bit.
        """
        return self.product(x, w, lanes=False)

    def grouped(self, x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Rows of x [rows, depth] by experts w [experts, depth, columns]; ends [experts]: where each one's
        rows end.
        """
        answer = x.new_zeros(len(x), w.shape[2])
        begin = 0
        for expert, end in enumerate(ends.tolist()):
            if end > begin:
                answer[begin:end] = self.mm(x[begin:end], w[expert])
            begin = end
        return answer

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [batches, heads, tokens, key_dim] over keys and values [batches, key heads,
        columns, dim]: [batches, heads, tokens, value_dim].

        mask: [batches or 1, heads or 1, tokens or 1, columns], boolean (True is seen) or added. A column that
        is masked takes no part in any sum: its content and its place change no bit. A token that sees nothing
        gives 0.
        """
        _require_alike(query, keys=keys, values=values)
        batches, heads, tokens, key_dim = query.shape
        columns = keys.shape[2]
        query = _dense(query)
        keys = _dense(keys)
        values = _dense(values)
        kind = 0
        strides: tuple[int, ...] = (0, 0, 0, 0)
        if mask is not None:
            kind = 1 if mask.dtype == torch.bool else 2
            mask = mask if kind == 1 else mask.float()
            mask = mask.expand(batches, heads, tokens, columns)
            strides = mask.stride()
        sinks = None if sinks is None else sinks.float().contiguous()
        out = torch.empty(batches, heads, tokens, values.shape[3], dtype=query.dtype, device="cpu")
        call = _AttentionStruct(
            query=query.data_ptr(), keys=keys.data_ptr(), values=values.data_ptr(),
            mask=None if mask is None else mask.data_ptr(), sinks=None if sinks is None else sinks.data_ptr(),
            out=out.data_ptr(), batches=batches, heads=heads, group=heads // keys.shape[1], tokens=tokens,
            columns=columns, key_dim=key_dim, value_dim=values.shape[3],
            query_batch=query.stride(0), query_head=query.stride(1), query_token=query.stride(2),
            key_batch=keys.stride(0), key_head=keys.stride(1), key_token=keys.stride(2),
            value_batch=values.stride(0), value_head=values.stride(1), value_token=values.stride(2),
            mask_kind=kind, mask_batch=strides[0], mask_head=strides[1], mask_token=strides[2],
            mask_column=strides[3], causal=causal, dtype=DTYPES[query.dtype], threads=torch.get_num_threads(),
            scale=key_dim**-0.5 if scale is None else scale, softcap=softcap or 0.0,
        )  # fmt: skip
        if out.numel():
            self.library.attend_dense(ctypes.addressof(call))
        return out

    def rows(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        """Sums, softmaxes or the like of each row of x [rows, width], float32: [rows], or of a softmax [rows,
        width].
        """
        x = x.contiguous()
        out = (
            torch.empty_like(x)
            if kind.endswith("softmax")
            else torch.empty(len(x), dtype=x.dtype, device="cpu")
        )
        if out.numel():
            self.library.rows(
                ROWS.index(kind), x.data_ptr(), out.data_ptr(), *x.shape, torch.get_num_threads()
            )
        return out

    def mapped(self, kind: str, x: torch.Tensor, parameter: float = 0.0) -> torch.Tensor:
        """A function of every number of x, computed in float32 and rounded to x's dtype."""
        dtype = x.dtype
        x = x.float().contiguous()
        out = torch.empty_like(x)
        if out.numel():
            numbers = x.data_ptr(), out.data_ptr(), x.numel()
            self.library.map(MAPS.index(kind), *numbers, parameter, torch.get_num_threads())
        return out.to(dtype)
