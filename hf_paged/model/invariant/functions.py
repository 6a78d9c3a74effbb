"""Above autograd: the attention that models ask for, and what the mode below autograd need not see."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...kv.ops import invariant_kernels
from ...kv.reference import invariant
from ..weights_digest import PLAIN_TENSORS
from .fused_logprobs import answer_fused_logprobs
from .known import EXACT, MOVES, REAL, SPELLINGS, NotInvariant, kernels_for
from .mixed_batches import add_in_one_order

MATMULS = (torch.matmul, torch.Tensor.matmul, torch.linalg.matmul)


class FunctionCalls(TorchFunctionMode):
    """Computes what models ask of `scaled_dot_product_attention`, and hides from the mode below autograd what
    needs nothing of it: to be seen takes longer than most functions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden_from: TorchDispatchMode | None = None
        self._hides: dict[Any, Callable[..., bool] | None] = {}
        """Of each function: says of arguments whether they need nothing of the mode. None if they may."""
        self.entered = False
        """True while the block is entered, for backward passes: threads of a device do them, which do not see
        `invariant`.
        """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer_fused_logprobs(NotInvariant)  # at every call: TRL and peft may be imported in the block
        add_in_one_order()
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and (
            invariant.get() or (self.entered and torch._C._current_autograd_node() is not None)
        ):
            return self.attend(*args, **kwargs)
        if func is linear:
            args, kwargs = _in_one_piece(*args, **kwargs), {}
        elif func in MATMULS:
            args, kwargs = _in_one_way(*args, **kwargs)
        if func not in self._hides:
            self._hides[func] = _why_hidden(func)
        hides = self._hides[func]
        plain = PLAIN_TENSORS.issuperset(types)
        if hides is None or not plain or not invariant.get() or not hides(*args, **kwargs):
            return func(*args, **kwargs)
        depth = torch._C._len_torch_dispatch_stack()
        if not depth or torch._C._get_dispatch_stack_at(depth - 1) is not self.hidden_from:
            return func(*args, **kwargs)
        try:
            torch._C._pop_torch_dispatch_stack(None)
            return func(*args, **kwargs)
        finally:
            if torch._C._len_torch_dispatch_stack() < depth:  # not if an interrupt came first
                torch._C._push_on_torch_dispatch_stack(self.hidden_from)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """`scaled_dot_product_attention`, each query's sums in the order of the tokens that it sees."""
        if torch._C._functorch.maybe_current_level() is not None:  # tensors without memory
            raise NotInvariant(
                "batch_invariant() supports no attention under transforms of torch.func (vmap, grad, jvp); "
                "call the model without them"
            )
        kernels = kernels_for(query)
        if dropout_p:
            raise NotInvariant(f"batch_invariant() with attention dropout of {dropout_p}; set it to zero")
        if query.dim() != 4 or key.dim() != 4:
            raise NotInvariant(
                f"batch_invariant() supports attention of [batch, heads, tokens, dim], got {[*query.shape]}"
            )
        if torch.is_autocast_enabled(query.device.type):  # torch casts for its own below this
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (each.to(dtype) for each in (query, key, value))
        if len(key) != len(query):
            key, value = (each.expand(len(query), -1, -1, -1) for each in (key, value))
        given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in given)
        attend = partial(_attended, kernels, causal=is_causal, scale=scale)
        if not learns:
            return attend(query, key, value, attn_mask)
        trained: torch.Tensor = _TrainedAttention.apply(  # type: ignore[no-untyped-call]  # torch's own
            attend, query, key, value, attn_mask
        )
        return trained


def _why_hidden(func: Any) -> Callable[..., bool] | None:
    """The test of a function's arguments that they need nothing of the mode; None: they may need it."""
    name = getattr(func, "__name__", "")
    if func is linear:
        return _is_torchs_linear
    if isinstance(func, (FunctionType, torch._ops.OpOverloadPacket)):  # it may call anything
        return None
    if name in ("add", "sub", "mul"):
        return _is_rounded_once
    if name in REAL:
        return _is_float32
    return _always if name in EXACT or name in MOVES or name in SPELLINGS else None


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _is_rounded_once(*args: Any, **kwargs: Any) -> bool:
    """True if it is a sum without a factor, or a product of real numbers."""
    return len(args) == 2 and not kwargs and isinstance(args[0], torch.Tensor) and not args[0].is_complex()


def _is_float32(input: Any, **kwargs: Any) -> bool:
    return not kwargs and input.dtype == torch.float32


def _in_one_piece(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """Arguments of a linear layer. Torch has other ways for rows that lie apart: it rounds before it adds the
    bias, or multiplies each sequence's rows by themselves.
    """
    return _laid_out(input), weight, bias


def _in_one_way(input: Any, other: Any, **out: Any) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Arguments of matmul. Where one of them is a matrix, torch's way depends on how the other lies and on
    gradients.
    """
    if other.dim() == 2 and input.dim() > 2:
        input = _laid_out(input)
    elif input.dim() == 2 and other.dim() > 2:
        input = input.expand(*other.shape[:-2], -1, -1)
    return (input, other), out


def _laid_out(x: torch.Tensor) -> torch.Tensor:
    """x in one piece. Torch's products read the strides of dimensions of one, which are any number: those of
    the last token of a row are its prompt's.
    """
    x = x.contiguous()
    width = 1
    for size, stride in zip(x.shape[::-1], x.stride()[::-1], strict=True):
        if stride != width:
            return x.flatten().view(x.shape)
        width *= size
    return x


def _is_torchs_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """True if torch's own product of a CUDA device is known to have the order of the mode for these."""
    if not input.is_cuda or input.dim() not in (2, 3) or torch.is_autocast_enabled("cuda"):
        return False
    shown: bool = invariant_kernels("cuda").is_torchs_linear(input, weight, bias)
    return shown


def _attended(
    kernels: Any, query: torch.Tensor, *others: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    """Attention of query over keys, values and a mask, or a refusal by name."""
    try:
        answer: torch.Tensor = kernels.attend(query, *others, **options)
    except NotImplementedError as error:
        raise NotInvariant(f"batch_invariant() has no fixed order on {query.device} for {error}") from error
    return answer


class _TrainedAttention(torch.autograd.Function):
    """Attention of fixed order forwards; its gradients are those of torch's own."""

    @staticmethod
    def forward(ctx: Any, attend: partial[torch.Tensor], *given: torch.Tensor | None) -> torch.Tensor:
        """given: query, keys, values and a mask."""
        ctx.save_for_backward(*given)
        ctx.options = {"is_causal": attend.keywords["causal"], "scale": attend.keywords["scale"]}
        return attend(*given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, mask = ctx.saved_tensors
        query, key, value = (each.detach().requires_grad_() for each in saved)
        learned = ctx.needs_input_grad[4]
        if learned:  # a bias of the model's
            mask = mask.detach().requires_grad_()
        options = ctx.options | {"attn_mask": mask, "enable_gqa": query.shape[1] != key.shape[1]}
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            answer = scaled_dot_product_attention(query, key, value, **options)
            inputs = (query, key, value, mask) if learned else (query, key, value)
            gradients = torch.autograd.grad(answer, inputs, gradient)
        return (None, *gradients[:3], gradients[3] if learned else None)
