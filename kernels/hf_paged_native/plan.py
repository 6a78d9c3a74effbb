"""The library's functions on tensors: planned once a step, run once a layer."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from .building import Unavailable

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _StepStruct(ctypes.Structure):
    """`Step` of paged.cpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("table", "lengths", "groups", "scratch")),
        *((name, c_int64) for name in ("rows", "width", "block_size", "tokens", "heads", "group")),
        *((name, c_int64) for name in ("key_dim", "value_dim")),
        *((name, c_int64) for name in ("key_slot", "key_head", "value_slot", "value_head")),
        *((name, c_int64) for name in ("window", "causal", "dtype", "threads")),
    ]  # fmt: skip


_Strides = c_int64 * 3
"""`Strides` of paged.cpp: of a row, a head and a token."""


class Library:
    """The compiled functions."""

    def __init__(self, file: Path) -> None:
        self.file = file
        library = ctypes.CDLL(str(file))
        self.scratch = library.hf_paged_scratch
        self.attend = library.hf_paged_attend
        self.write = library.hf_paged_write
        self.scratch.restype = c_int64
        self.scratch.argtypes = [c_void_p]
        self.attend.restype = None
        self.attend.argtypes = [c_void_p] * 7 + [c_float, c_float]
        self.write.restype = None
        self.write.argtypes = [c_void_p] * 7
        self.product = library.hf_paged_product
        self.attend_dense = library.hf_paged_attend_dense
        self.rows = library.hf_paged_rows
        self.map = library.hf_paged_map
        self.product.argtypes = [c_void_p]
        self.attend_dense.argtypes = [c_void_p]
        self.rows.argtypes = [c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64]
        self.map.argtypes = [c_int64, c_void_p, c_void_p, c_int64, c_float, c_int64]
        for function in (self.product, self.attend_dense, self.rows, self.map):
            function.restype = None
        library.hf_paged_threads.restype = None
        library.hf_paged_threads.argtypes = [c_void_p, c_void_p]
        library.hf_paged_threads(*_threads_of_torch())


@cache
def load(file: Path) -> Library:
    """The library in `file`, loaded once."""
    try:
        return Library(file)
    except (OSError, AttributeError) as error:
        raise Unavailable(f"{file} cannot be loaded ({error}); delete it and build it again") from error


def _threads_of_torch() -> tuple[int | None, int | None]:
    """The entries to the threads that torch works with: its OpenMP runtime's, or its own where a release has
    it (2.10).
    """
    own = Path(torch.__file__).parent / "lib"
    for library in (*own.glob("libtorch_cpu.so"), *own.glob("libtorch_cpu.dylib")):
        found = _address(ctypes.CDLL(str(library)), "torch_parallel_for")
        if found is not None:
            return None, found
    return _address(ctypes.CDLL(None), "GOMP_parallel"), None


def _address(library: ctypes.CDLL, name: str) -> int | None:
    function = getattr(library, name, None)
    return None if function is None else ctypes.cast(function, c_void_p).value


class _Launch:
    """A step's facts for the library beside the layers' own tensors. It lives as long as its shapes last.

    keys [slots, heads, key_dim] and values [slots, heads, value_dim] are those of any of the layers.
    """

    def __init__(
        self, library: Library, keys: torch.Tensor, values: torch.Tensor, block_size: int, tokens: int
    ) -> None:
        heads, key_dim = keys.shape[1:]
        for data in (keys, values):
            if data.device.type != "cpu":  # its address means nothing here
                raise ValueError(f"Invalid device of keys or values: expected cpu, got {data.device}")
        self.library = library
        self.step = _StepStruct(
            block_size=block_size, tokens=tokens, heads=heads, group=1, key_dim=key_dim,
            value_dim=values.shape[2],
            key_slot=keys.stride(0), key_head=keys.stride(1), value_slot=values.stride(0),
            value_head=values.stride(1),
            dtype=DTYPES[keys.dtype],
        )  # fmt: skip
        self.address = ctypes.addressof(self.step)
        self._kept: tuple[torch.Tensor | None, ...] = ()

    def update(self, table: torch.Tensor, lengths: torch.Tensor, groups: torch.Tensor | None = None) -> None:
        """Begin a step: block ids table [rows, width], tokens lengths [rows], this step's included, and
        numbers [rows, 8] of groups of rows that read common blocks together, int32 and dense.
        """
        step = self.step
        step.table = table.data_ptr()
        step.lengths = lengths.data_ptr()
        step.groups = None if groups is None else groups.data_ptr()
        step.rows, step.width = table.shape
        step.threads = torch.get_num_threads()
        self._kept = (table, lengths, groups)


class Write(_Launch):
    """The write of a step's keys [rows, heads, tokens, key_dim] and values [rows, heads, tokens,
    value_dim].
    """

    def __init__(
        self,
        library: Library,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        block_size: int,
    ) -> None:
        super().__init__(library, key_pool, value_pool, block_size, keys.shape[2])
        self._strides = _Strides(*keys.stride()[:3]), _Strides(*values.stride()[:3])
        self._of_keys, self._of_values = (ctypes.addressof(strides) for strides in self._strides)

    def run(
        self, keys: torch.Tensor, values: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor
    ) -> None:
        """Put them into their slots. A token before its row's first is padding and has none."""
        self.library.write(
            self.address,
            keys.data_ptr(),
            self._of_keys,
            values.data_ptr(),
            self._of_values,
            key_pool.data_ptr(),
            value_pool.data_ptr(),
        )


class Attend(_Launch):
    """Attention of query [rows, query_heads, tokens, key_dim] over pages.

    window: how far back a token sees, itself included. causal: whether it sees only what is at or before it;
        else all there is.
    """

    def __init__(
        self,
        library: Library,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_size: int,
        window: int | None = None,
        causal: bool = True,
    ) -> None:
        super().__init__(library, keys, values, block_size, query.shape[2])
        self.step.group = query.shape[1] // keys.shape[1]
        self.step.window = window or 0
        self.step.causal = causal
        self.scale = query.shape[3] ** -0.5
        self._strides = _Strides(*query.stride()[:3])
        self._of_query = ctypes.addressof(self._strides)
        rows, query_heads, tokens, _ = query.shape
        # An answer like it takes half the time of one by its shape, dtype and device.
        self._answer = torch.empty(
            (rows, tokens, query_heads, values.shape[2]), dtype=query.dtype, device=query.device
        )
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    def update(self, table: torch.Tensor, lengths: torch.Tensor, groups: torch.Tensor | None = None) -> None:
        if groups is not None and (
            groups.shape != (len(table), 8) or groups.dtype != torch.int32 or self.step.window
        ):
            raise ValueError(
                f"Invalid groups: expected [{len(table)}, 8] of torch.int32 without a window, got "
                f"{list(groups.shape)} of {groups.dtype} with window {self.step.window}"
            )
        super().update(table, lengths, groups)
        need = self.library.scratch(self.address)
        if need > self._scratch.numel():
            # Whatever the user's default dtype and device are: the library writes floats here.
            self._scratch = torch.empty(need, dtype=torch.float32, device="cpu")
            self.step.scratch = self._scratch.data_ptr()

    def run(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """softmax(softcap(query keys^T * scale)) values, [rows, tokens, query_heads, value_dim]; sinks
        [query_heads], float32.

        A token that sees nothing gives 0.
        """
        out = torch.empty_like(self._answer)
        self.library.attend(
            self.address, query.data_ptr(), self._of_query, keys.data_ptr(), values.data_ptr(),
            out.data_ptr(),
            None if sinks is None else sinks.data_ptr(), self.scale if scale is None else scale,
            softcap or 0.0,
        )  # fmt: skip
        return out
