"""What torch.func's levels hide from a derivative: leaves below a batch, tangents of tangents."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def batch_of_leaves(x: object) -> bool:
    """True for a batch of torch.vmap over a tensor that requires a gradient; the batch says no."""
    f = torch._C._functorch
    if not isinstance(x, Tensor) or not f.is_functorch_wrapped_tensor(x):
        return False
    below: Tensor = f.get_unwrapped(x)
    return below.requires_grad or batch_of_leaves(below)


def in_a_batch_of_gradients(x: object) -> bool:
    """True for what torch.autograd.grad passes with is_grads_batched=True. A formula's graph would
    end at the batch, which says that it requires no gradient; the registered operator's is one of
    each member.
    """
    return isinstance(x, Tensor) and torch._C._functorch.is_legacy_batchedtensor(x)


class _Primals:
    """A ctx whose saved tensors have no tangents at torch.func's level."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self.saved_tensors = tuple(x if x is None else _primal(x) for x in ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _primal(x: Tensor) -> Tensor:
    """Without its tangent; in a batch too, for which torch has no rule of that."""
    f = torch._C._functorch
    if not f.is_batchedtensor(x):
        return forward_ad.unpack_dual(x).primal
    return f._add_batch_dim(_primal(f.get_unwrapped(x)), f.maybe_get_bdim(x), f.maybe_get_level(x))


def nested(tangent: Callable) -> Callable:
    """A formula of forward mode whose results have tangents of their own at torch.func's lower
    levels: torch calls it with forward mode off, which there would lose them without a word.
    """

    def formula(ctx: Any, *tangents: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return tangent(ctx, *tangents)
        with forward_ad._set_fwd_grad_enabled(True):
            return tangent(_Primals(ctx), *tangents)

    return formula
