"""`loader.operator`: a kernel of the user's and its reference in plain PyTorch, as an operator.

torch gets two operators, `ns::name` and `ns::name_backward`, both opaque to torch.compile, so that
what is compiled calls the kernels too. All that a kernel has not comes from the reference: shapes
of results, where the reference runs on tensors without data; gradients, by torch.func.vjp of it;
forward mode and derivatives of derivatives.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import derive, frame, given
from . import sharding as rules
from .watch import Watch, plainly, tidy

_RETURNS = re.compile(r"-> (?:Tensor|\((?:Tensor(?:, )?)+\)|\(\))$")


def operator(
    reference: Callable | None = None,
    *,
    kernel: Callable | Mapping[str, Callable] | None = None,
    backward: Callable | None = None,
    name: str | None = None,
    mutates: Sequence[str] = (),
    sharding: str | None = None,
) -> Any:
    """Make a kernel of yours and its reference in plain PyTorch an operator of torch.

        mod = loader.source_module(source)

        def double_kernel(x, factor):
            out = torch.empty_like(x)
            mod.scale(out, x, factor, x.numel(), grid=(x.numel() + 255) // 256, block=256)
            return out

        @loader.operator(kernel=double_kernel, name="mine::scale")
        def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
            return x * factor

    It is differentiable, also twice and in forward mode, and works under `torch.compile`,
    `torch.func`, `torch.vmap` and `torch.export`. Called once more with the same name, as in a
    notebook's cell that is run again, it replaces the operator.

    Args:
        reference: the same in plain PyTorch, with annotated arguments (tensors, numbers, strings,
            lists of numbers, None) that returns a tensor or a tuple of tensors. Gives the schema,
            and serves where there is no kernel.
        kernel: takes the arguments of the reference in their order, tensors contiguous and without
            gradients, and returns what that does; or a dict of such by type of device, as
            {"cuda": f}, other devices being served by the reference. Results are made contiguous.
        backward: `backward(grad, ..., *arguments)` gets a gradient for each result, then the
            arguments, and returns a gradient for each tensor argument, None for zero; all tensors
            as for the kernel.
            Without it the reference is differentiated.
        name: "namespace::name"; by default "local::" and the name of the reference.
        mutates: names of the arguments that kernel and reference write to; such an operator has no
            gradient, and returns nothing.
        sharding: along which sizes DTensors may be cut, by the shapes of tensor arguments and
            results: those with a name, "(N, _), (N, 3) -> (N, _)" where rows do not depend on each
            other, "(...) -> (...)" where elements do not. Without it each rank computes everything.

    Returns: the operator, a function with the signature of the reference. Its `op` is torch's
        OpOverload, `reference` the reference, and `check(*arguments)` compares kernel and reference
        on arguments, with gradients, and in halves as `sharding` has it, and runs
        torch.library.opcheck. Without `reference` a
        decorator.

    Raises: TypeError or ValueError for a reference whose schema cannot be told, or a name that is
        taken. A call raises RuntimeError where the kernel's result has another type, shape, dtype
        or device than the reference's, changes an argument that is not among `mutates`, or returns
        one: looked at in the first call with arguments of each kind (shapes, dtypes, devices).
    """
    if reference is None:
        return functools.partial(
            operator,
            kernel=kernel,
            backward=backward,
            name=name,
            mutates=mutates,
            sharding=sharding,
        )
    if not callable(reference):
        raise TypeError(f"operator: reference must be a function, got {type(reference).__name__}")
    return Definition(reference, kernel, backward, name, mutates, sharding).function()


class Definition:
    """What one operator is made of, and the functions that torch is given."""

    def __init__(
        self,
        reference: Callable,
        kernel: Callable | Mapping[str, Callable] | None,
        backward: Callable | None,
        name: str | None,
        mutates: Sequence[str],
        sharding: str | None,
    ):
        self.reference, self.backward, self.mutates = reference, backward, mutates
        self.name = given.checked_name(name, reference)
        if isinstance(mutates, str) or not isinstance(mutates, Sequence):
            got = f"[{mutates!r}]" if isinstance(mutates, str) else "a list of them"
            raise TypeError(f"{self.name}: mutates must be names of arguments; write {got}")
        try:
            self.parameters = [*inspect.signature(reference).parameters.values()]
        except ValueError:
            raise TypeError(
                f"{self.name}: the reference must be a function of Python with annotated "
                f"arguments, got {reference!r}; write one that calls it"
            ) from None
        self.schema = self._find_schema()
        self.kernels = given.kernels_of(self.name, kernel, [p.name for p in self.parameters])
        self.tensors = [i for i, a in enumerate(self.schema.arguments) if "Tensor" in str(a.type)]
        self.shapes = self._shapes(sharding)
        written = [p.name in mutates for p in self.parameters]
        named = [p.name for p in self.parameters]
        self._watch = Watch(self.name, named, written, self.run_reference)
        if backward is not None:
            count = len(self.schema.returns)
            grads = ["grad"] if count == 1 else [f"grad_{i}" for i in range(count)]
            given.check_function(self.name, "backward", backward, [*grads, *named])
        if backward is not None and mutates:
            raise ValueError(
                f"{self.name}: an operator that writes to {', '.join(mutates)} has no gradient; "
                "leave out backward, or have it return new tensors"
            )

    def function(self) -> Callable:
        """Register all with torch; the operator."""
        op = self._register()
        call = op if self.mutates else derive.differentiable(self, op)
        names, count = [p.name for p in self.parameters], len(self.parameters)
        defaults = {p.name: p.default for p in self.parameters if p.default is not p.empty}

        @functools.wraps(self.reference)
        def public(*args: Any, **named: Any) -> Any:
            if named or len(args) != count:
                args = tuple(given.bound(self.name, names, defaults, args, named))
            return call(*args)

        public.op, public.reference = op, self.reference  # type: ignore[attr-defined]
        public.check = self.check  # type: ignore[attr-defined]
        self.public = public
        return public

    def _find_schema(self) -> Any:
        """The schema by the annotations of the reference. Raises: TypeError, ValueError."""
        for p in self.parameters:
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                raise TypeError(f"{self.name}: the reference must name its arguments, got {p}")
            if p.annotation is p.empty:
                raise TypeError(
                    f"{self.name}: argument {p.name} of the reference must be annotated, with "
                    f"torch.Tensor, float, int, bool or the like; write {p.name}: torch.Tensor"
                )
        try:
            named = {p.name for p in self.parameters}
            if unknown := {*self.mutates} - named:
                raise ValueError(f"mutates names {', '.join(unknown)}, which is no argument")
            text = torch.library.infer_schema(self._positional(), mutates_args=[*self.mutates])
        except ValueError as error:
            said = re.split(r"Got func with|Please file", str(error))[0].strip()
            raise TypeError(f"{self.name}: the reference has no schema: {said}") from None
        if not _RETURNS.search(text) or bool(self.mutates) != text.endswith("()"):
            expected = "nothing, as it writes to arguments" if self.mutates else "tensors"
            got = text.rpartition("-> ")[2]
            raise TypeError(f"{self.name}: the reference must return {expected}, got {got}")
        if "Tensor[]" in text or "Tensor?[]" in text:
            raise TypeError(f"{self.name}: arguments must be tensors, not lists of them: {text}")
        self.text = text
        return torch._C.parse_schema(f"{self.name}{text}")

    def _positional(self) -> Callable:
        """The reference with all arguments by position, as torch calls operators."""

        def plain(*args: Any) -> Any:
            return self.run_reference(*args)

        signature = inspect.signature(self.reference)
        kinds = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in self.parameters]
        plain.__signature__ = signature.replace(parameters=kinds)  # type: ignore[attr-defined]
        return plain

    def run_reference(self, *args: Any) -> Any:
        """Call the reference with arguments in their order."""
        pairs = [*zip(self.parameters, args, strict=True)]
        by_name = {p.name: x for p, x in pairs if p.kind is p.KEYWORD_ONLY}
        return self.reference(*args[: len(args) - len(by_name)], **by_name)

    def _register(self) -> Any:
        """Give torch the operator, its kernel and its fake; the OpOverload."""
        frame.forget(self.name)
        try:
            made = torch.library.custom_op(
                self.name, self._run, mutates_args=[*self.mutates], schema=self.text
            )
        except RuntimeError as error:
            if "multiple times" not in str(error):
                raise
            raise ValueError(
                f"operator: {self.name} is registered already, not by loader.operator; choose "
                "another name"
            ) from None
        made.register_fake(self._fake)
        if not self.mutates:
            derive.one_by_one(made._opoverload)
            rules.offer(made._opoverload, self._cut)
        return made._opoverload

    def _shapes(self, text: str | None) -> rules.Shapes | None:
        """What `sharding` says. Raises: ValueError."""
        if text is None:
            return None
        try:
            found = rules.Shapes(text)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        counts = len(self.tensors), len(self.schema.returns)
        if self.mutates or (found.inputs, found.outputs) != counts:
            expected = "nothing, as the operator writes to arguments"
            if not self.mutates:
                expected = "the shapes of {} tensor arguments and {} results".format(*counts)
            raise ValueError(f"{self.name}: sharding must be {expected}, got {text!r}")
        return found

    def _cut(self, *args: Any) -> rules.Cut:
        args = self._filled(args)
        if self.shapes is None:
            return rules.replicated(args, len(self.schema.returns))
        inputs, outputs = rules.forward(self.shapes, [args[i] for i in self.tensors])
        of_tensors = dict(zip(self.tensors, inputs, strict=True))
        return [of_tensors.get(i) for i in range(len(args))], outputs

    def _fake(self, *args: Any) -> Any:
        """What the reference returns for tensors without data, as the kernel's: contiguous."""
        args = self._filled(args)
        return tidy(self.run_reference(*args), args)

    def _filled(self, args: tuple) -> tuple:
        """All arguments: torch leaves out those at the end that have their default."""
        return (*args, *(p.default for p in self.parameters[len(args) :]))

    def _run(self, *args: Any) -> Any:
        """The kernel's result, or the reference's where there is none."""
        args = self._filled(args)
        device = next((x.device.type for x in args if isinstance(x, Tensor)), "cpu")
        kernel = self.kernels.get(device, self.kernels.get(""))
        if kernel is None:
            return tidy(self._watch.run(None, args), args)
        written = (p.name in self.mutates for p in self.parameters)
        plain = [plainly(x, w) for x, w in zip(args, written, strict=True)]
        return tidy(self._watch.run(kernel, plain), ())

    def check(self, *args: Any, **named: Any) -> None:
        """Compare kernel and reference on arguments, their gradients too, and run opcheck.

        Raises: AssertionError with the first difference, by torch.testing.assert_close.
        """
        names = [p.name for p in self.parameters]
        defaults = {p.name: p.default for p in self.parameters if p.default is not p.empty}
        args = tuple(given.bound(self.name, names, defaults, args, named))
        results = []
        for call in (self.public, self.run_reference):
            own = [_leaf(x, not self.mutates) for x in args]
            out = call(*own)
            outs = [out] if isinstance(out, Tensor) else [*(out or ())]
            smooth = [x for x in own if derive.is_smooth(x) and x.requires_grad]
            wanted = [o for o in outs if derive.is_smooth(o) and o.requires_grad]
            total = [o.abs().square().sum() for o in wanted]
            grads = []
            if total and not self.mutates:
                grads = [*torch.autograd.grad(sum(total), smooth, allow_unused=True)]
                pairs = zip(grads, smooth, strict=True)
                grads = [torch.zeros_like(x) if g is None else g for g, x in pairs]
            written = [x for p, x in zip(names, own, strict=True) if p in self.mutates]
            results.append([x.detach() for x in (*outs, *grads, *written)])
        torch.testing.assert_close(*results)
        self._check_halves(args)
        torch.library.opcheck(self.public.op, args)  # type: ignore[attr-defined]

    def _check_halves(self, args: tuple) -> None:
        """AssertionError where sizes may be cut by `sharding` that may not be."""
        if self.shapes is None:
            return

        def run(*tensors: Any) -> Any:
            own = dict(zip(self.tensors, tensors, strict=True))
            return self.public(*[own.get(i, x) for i, x in enumerate(args)])

        tensors = [args[i] for i in self.tensors]
        with torch.no_grad():
            whole = run(*tensors)
            whole = whole if isinstance(whole, tuple) else (whole,)
            for name, found in rules.in_halves(self.shapes, run, tensors):
                message = f"{self.name}: sharding: results in halves along {name} differ: "
                torch.testing.assert_close(found, whole, msg=lambda m, to=message: to + m)


def _leaf(x: Any, wanted: bool) -> Any:
    """A copy of a tensor, which wants a gradient where that is wanted and there can be one."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().clone().requires_grad_(wanted and derive.is_smooth(x))
