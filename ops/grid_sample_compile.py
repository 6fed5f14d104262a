"""`torch.compile` while torch's grid_sample runs on other kernels.

Inductor writes `aten.grid_sampler_2d` out as arithmetic on pixels, of which no kernel is left to
replace. While this is on it calls the operator instead, as it always does for its backward and for
three dimensions. Functions that are compiled already are dealt with by a guard of Dynamo's, by
which they depend on the identity of `F.grid_sample`'s code: it gets a copy of that code, so they
are compiled once more, and later find either version again. The caches on disk are told by their
tag.
"""

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder

import torch
import torch.nn.functional as F

_OPERATOR = torch.ops.aten.grid_sampler_2d.default
_LOWERING = "torch._inductor.lowering"
_TAG = "octet.accelerate_torch"
_own, _copy = F.grid_sample.__code__, F.grid_sample.__code__.replace()
_undo = []


def begin() -> None:
    """From now on compiled code calls the operator."""
    if F.grid_sample.__code__ is _own:
        F.grid_sample.__code__ = _copy
    torch.compiler.config.cache_key_tag += _TAG
    if _LOWERING in sys.modules:
        _keep_operator()
    else:
        sys.meta_path.insert(0, _finder)  # its import takes seconds, and few need it


def end() -> None:
    """As it was."""
    if F.grid_sample.__code__ is _copy:
        F.grid_sample.__code__ = _own
    config = torch.compiler.config
    config.cache_key_tag = config.cache_key_tag.replace(_TAG, "", 1)
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    while _undo:
        _undo.pop()()


def _keep_operator() -> None:
    """Have Inductor call the operator rather than write it out."""
    from torch._inductor import decomposition, lowering

    decompose = decomposition.decompositions.pop(_OPERATOR)
    decomposition.fast_random_decomps.cache_clear()  # a copy of the former
    if _OPERATOR not in lowering.lowerings:
        # Stays: a graph traced while this is on may be compiled later, as backwards are. Others
        # have the operator written out before they come to this.
        lowering.make_fallback(_OPERATOR, warn=False)

    def undo():
        decomposition.decompositions[_OPERATOR] = decompose
        decomposition.fast_random_decomps.cache_clear()

    _undo.append(undo)


class _Finder(MetaPathFinder, Loader):
    """Changes Inductor when it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != _LOWERING:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        self._loader, found.loader = found.loader, self
        return found

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _keep_operator()


_finder = _Finder()
