"""A pytest plugin of the sanitizers' runs: each operator takes the place of its reference.

What they compute is compared where nothing watches; here the operators are to be called with all
that they are called with there, and the references, plain PyTorch, took half of the time. So did
gradcheck, which calls the same kernels for each element of each input: here they are called once.
"""

import contextlib

import torch

import loader


def differentiated(function, inputs, *_, again=False, **options):
    """What gradcheck has called of `function`, once; `again`: and gradgradcheck."""
    out = function(*inputs)
    outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x.requires_grad]
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    assert outs and leaves
    grads = [torch.rand_like(x).requires_grad_(again) for x in outs]
    found = torch.autograd.grad(outs, leaves, grads, create_graph=again, allow_unused=True)
    if again:
        found = [x for x in found if x is not None and x.requires_grad]
        weights = [torch.rand_like(x) for x in found]
        torch.autograd.grad(found, [*leaves, *grads], weights, allow_unused=True)
    return True


torch.autograd.gradcheck = differentiated
torch.autograd.gradgradcheck = lambda *inputs, **options: differentiated(
    *inputs, again=True, **options
)
for name in loader._session.units:
    with contextlib.suppress(loader.BuildError):  # of those that another run has
        setattr(loader, f"{name}_reference", getattr(loader, name))
