"""The Python side that operators share."""

import pytest
import torch

import loader
from loader.jit.operators import frame


def test_torch_fx_traces_elementwise_operators():
    """A Proxy stands for a tensor; what does not is refused, also beside one."""

    def function(a, b):
        return loader.square(loader.add2(a, b))

    traced = torch.fx.symbolic_trace(function)
    a, b = torch.rand(2, 3, 4).requires_grad_()
    assert torch.equal(traced(a, b), function(a, b)) and traced(a, b).requires_grad
    with pytest.raises(TypeError, match=r"^add2: b must be a .*, got list; convert"):
        torch.fx.symbolic_trace(lambda a: loader.add2(a, [1.0]))


def test_a_lack_of_memory_has_torchs_class():
    """Of a kernel that can only say it in words, with a gradient wanted and without one."""
    words = "CUDA out of memory. Tried to allocate 1.00 GiB on cuda:0."

    def raising(x):
        raise RuntimeError(words if len(x) > 1 else "add2: " + words)

    with torch.library._scoped_library("octet_test", "DEF") as library:
        library.define("raising(Tensor x) -> Tensor")
        library.impl("raising", raising, "CompositeExplicitAutograd")
        operator = torch.ops.octet_test.raising.default
        call = frame.differentiable(
            operator, lambda *_: None, lambda ctx, grad: grad, lambda *_: None
        )
        for wanted in (False, True):
            with pytest.raises(torch.OutOfMemoryError) as lack:
                call(torch.ones(2, requires_grad=wanted))
            assert str(lack.value) == words and lack.value.__suppress_context__
            with pytest.raises(RuntimeError) as other:
                call(torch.ones(1, requires_grad=wanted))
            assert type(other.value) is RuntimeError
