"""What every operator refuses, in whatever mode it is called: a part of the battery."""

import contextlib

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


def over_floats(transform):
    """A way to call a function: `transform(function, tensors)`, all but floats being constants."""

    def run(call, args):
        at = [i for i, x in enumerate(args) if is_dense(x) and x.is_floating_point()]

        def function(*some):
            given = dict(zip(at, some, strict=True))
            return call(*(given.get(i, x) for i, x in enumerate(args)))

        return transform(function, tuple(args[i] for i in at)) if at else NotImplemented

    return run


def with_tensors(change, within=contextlib.nullcontext):
    """A way to call a function: of other tensors, in a mode."""

    def run(call, args):
        with within():
            return call(*(change(x) if isinstance(x, Tensor) else x for x in args))

    return run


def is_dense(x) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided


def wants_gradient(x):
    return x.detach().requires_grad_(x.is_floating_point())


def compiled(dynamic):
    def run(call, args):
        if any(isinstance(x, Tensor) and not is_dense(x) for x in args):
            return NotImplemented  # torch.compile refuses these itself
        whole = torch.compile(lambda *x: call(*x), backend="eager", fullgraph=True, dynamic=dynamic)
        return whole(*args)

    return run


def exported(function, tensors):
    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return function(*tensors)

    return torch.export.export(Module(), tensors)


def on_meta(call, args):
    """Of what is wrong with a device or a layout nothing is left there."""
    if len({(x.device, x.layout) for x in args if isinstance(x, Tensor)}) > 1:
        return NotImplemented
    return with_tensors(lambda x: x.to("meta"))(call, args)


def under_fake(call, args):
    mode = FakeTensorMode()
    return with_tensors(mode.from_tensor)(call, args)


# How bad input may arrive; what the function returns where a way does not take it is NotImplemented.
# For tracers the message stands within their own.
WAYS = {
    "a gradient wanted": with_tensors(wants_gradient),
    "inference": with_tensors(lambda x: x, torch.inference_mode),
    "autocast": with_tensors(lambda x: x, lambda: torch.autocast("cpu", torch.bfloat16)),
    "checkpoint": lambda call, args: with_tensors(wants_gradient)(
        lambda *x: checkpoint(call, *x, use_reentrant=False), args
    ),
    "meta": on_meta,
    "fake": under_fake,
    "vmap": over_floats(lambda f, x: torch.vmap(f)(*(torch.stack([y] * 3) for y in x))),
    "jvp": over_floats(lambda f, x: torch.func.jvp(f, x, x)),
    "jacrev": over_floats(lambda f, x: torch.func.jacrev(f, tuple(range(len(x))))(*x)),
    "functionalize": over_floats(lambda f, x: torch.func.functionalize(f)(*x)),
    "compile": compiled(dynamic=False),
    "compile, any sizes": compiled(dynamic=True),
    "export": over_floats(exported),
}
COMPILED = "compile", "compile, any sizes"
TRACERS = *COMPILED, "export"


class RefusalTests:
    """Tests of an operator whose names, `wrong_tensors` and `bad_input` are those of OperatorTests."""

    def mixed_devices(self):
        """As `bad_input` of the battery."""
        first, *others = self.names
        for i, name in enumerate(others, 1):
            tensors = self.small(dtype=torch.float32)
            tensors[i] = tensors[i].to("meta")
            message = f"{name} must be on the device of {first}, cpu, got meta; move one of them with .to()"
            yield tensors, {}, RuntimeError, message

    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own
    @pytest.mark.parametrize("way", WAYS)
    def test_bad_input_gets_one_message_in_every_mode(self, way):
        """The one that it gets in none."""
        torch.compiler.reset()
        cases, refused = [*self.wrong_tensors(), *self.mixed_devices(), *self.bad_input()], 0
        if way in COMPILED:  # which takes long: one half each
            cases = cases[COMPILED.index(way) :: 2]
        for tensors, options, kind, message in cases:

            def call(*tensors, options=options):
                return self.form()(*tensors, **options)

            try:
                out = WAYS[way](call, tensors)
            except Exception as error:
                text, expected = str(error), f"{self.name}: {message}"
                if way in TRACERS:
                    assert text.count(expected) == 1, text
                else:
                    assert type(error) is kind and text == expected
                    assert error.__context__ is None or error.__suppress_context__
                refused += 1
            else:
                assert out is NotImplemented, (tensors, options, message)
        assert refused >= 2 or len(self.names) == 1  # of which nothing may be left to transform

    def test_bad_input_of_the_backward_without_data(self):
        """Names grad_out, or what is compared with it, and says what came."""
        tensors = self.small(dtype=torch.float32)
        grad_out = self.call(*tensors)
        for change, message in self.backward_refuses:
            with pytest.raises(RuntimeError) as caught:
                self.backward(change(grad_out).to("meta"), *(x.to("meta") for x in tensors))
            name, got = message.split(" must ")[0], message.split("got ")[1]
            assert str(caught.value).startswith(f"{self.name}: {name} must ")
            assert str(caught.value).endswith(f"got {got}")

    @GPU
    def test_bad_input_while_a_cuda_graph_is_captured(self):
        """It is refused before anything is captured, and the capture goes on."""
        tensors = self.small("cuda", torch.float32)
        expected = self.call(*tensors)
        bad = [tensors[0].int(), None, *([tensors[0].cpu()] if len(tensors) > 1 else [])]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for first in bad:
                with pytest.raises((RuntimeError, TypeError), match=f"^{self.name}: "):
                    self.call(first, *tensors[1:])
            out = self.call(*tensors)
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
