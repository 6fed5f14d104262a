"""What is tested of every operator; its own test adds its formula, layouts and sizes."""

import inspect
import sys

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import loader
from loader.tests.modes import ModeTests

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


def several(results) -> tuple:
    """What a form returns, one tensor or more, as a tuple."""
    return results if isinstance(results, tuple) else (results,)


def masks(count: int) -> list[tuple[bool, ...]]:
    """Which of `count` tensors: all, each alone, all but each."""
    every = (True,) * count
    one = [tuple(i == k for k in range(count)) for i in range(count)]
    return [*dict.fromkeys([every, *one, *(tuple(not x for x in m) for m in one)])]


class OperatorTests(ModeTests):
    """`name` in `library`, with `small` arguments and `cases` of opcheck of its own.

    Attributes:
        options: of the operator, where a test is of something else.
        variants: all options of which derivatives are checked.
        gradcheck: how, beyond torch's defaults.
        dtypes: what the first tensor may be, in the words of the messages.
        rounding: what torch.compile may change.
        inductor: options of torch.compile. To compile C++ for what surrounds an operator takes ten
            seconds; torch's own kernels are called instead, but for one operator.
    """

    name: str
    library = loader
    options: dict = {}
    variants: tuple = ({},)
    gradcheck: dict = {}
    dtypes = "float32, float64, float16 or bfloat16"
    rounding: dict = {}
    inductor: dict = {"disable_cpp_codegen": True}
    backward_refuses: tuple = ()  # what is done to grad_out, and the message after the name

    def pytest_generate_tests(self, metafunc):
        if "variant" in metafunc.fixturenames:
            metafunc.parametrize("variant", self.variants, ids=str)

    @pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
    def device(self, request):
        """As in conftest.py, which an operator of another folder does without."""
        return request.param

    def form(self, suffix=""):
        return getattr(self.library, self.name + suffix)

    def raw(self, suffix=""):
        return getattr(torch.ops.octet, self.name + suffix).default

    def call(self, *tensors):
        return self.form()(*tensors, **self.options)

    def loss(self, *tensors):
        return self.call(*tensors).square().sum()

    def backward(self, grad_out, *tensors, mask=None, **options):
        """The gradients that a mask asks for, all without one."""
        options = self.options | options
        if len(tensors) > 1:
            options["output_mask"] = mask or (True,) * len(tensors)
        return several(self.form("_bw")(grad_out, *tensors, **options))

    @property
    def module(self):
        return sys.modules[self.form().__module__]

    @property
    def names(self) -> list[str]:
        """Of the tensors."""
        parameters = inspect.signature(self.form()).parameters.values()
        return [p.name for p in parameters if p.annotation is Tensor]

    def small(self, device="cpu", dtype=torch.float64, seed=0) -> list[Tensor]:
        """A few elements of each tensor, of one shape whatever the seed."""
        raise NotImplementedError

    def large(self, device) -> list[list[Tensor]]:
        """Arguments that keep a GPU busy for a moment."""
        raise NotImplementedError

    def leaves(self, *arguments) -> list[Tensor]:
        return [x.requires_grad_() for x in self.small(*arguments)]

    def test_help_shows_every_form(self):
        for suffix, mentions in (("", "Args:"), ("_fw", "without gradients"), ("_bw", "grad_out")):
            form = self.form(suffix)
            parameters = [*inspect.signature(form).parameters][suffix == "_bw" :]
            assert parameters[: len(self.names)] == self.names
            assert form.__name__ == self.name + suffix and mentions in form.__doc__

    def test_gradients(self, variant, device):
        def function(*tensors):
            return self.form()(*tensors, **variant)

        # The order of atomic additions moves a gradient by a last bit.
        how = {"nondet_tol": 0 if device == "cpu" else 1e-12, **self.gradcheck}
        assert torch.autograd.gradcheck(function, self.leaves(device), **how)
        assert torch.autograd.gradgradcheck(function, self.leaves(device), **how)

    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own
    def test_third_derivative(self, variant):
        results = []
        for suffix in ("", "_reference"):
            leaves = self.leaves()
            value = self.form(suffix)(*leaves, **variant).pow(3).sum()
            for _ in range(3):
                grads = torch.autograd.grad(value, leaves, create_graph=True)
                value = sum(grad.pow(2).sum() for grad in grads)
            results.append(grads)
        assert_close(*results)

    def test_gradients_only_where_they_are_asked_for(self, device):
        """Under autograd and by `X_bw`; the same ones whichever others are."""
        tensors = self.small(device)
        out = self.call(*tensors)
        grad_out = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape).to(out.dtype)
        every = self.backward(grad_out, *tensors)
        assert not out.requires_grad and len(every) == len(tensors)
        for mask in masks(len(tensors)):
            if not any(mask):
                continue
            leaves = [x.detach().requires_grad_(m) for x, m in zip(tensors, mask, strict=True)]
            self.call(*leaves).backward(grad_out)
            assert [x.grad is not None for x in leaves] == [*mask]
            expected = [x for x, m in zip(every, mask, strict=True) if m]
            assert_close([x.grad for x in leaves if x.grad is not None], expected)
            assert_close([*self.backward(grad_out, *tensors, mask=mask)], expected)
        for mask in [(False,) * len(tensors), (True,), True] if len(tensors) > 1 else []:
            with pytest.raises(ValueError, match=r"output_mask must be \w+ flags, for"):
                self.backward(grad_out, *tensors, mask=mask)

    def test_same_bits_in_every_run(self, device):
        torch.use_deterministic_algorithms(True)
        try:
            for tensors in self.large(device):
                grad_out = self.call(*tensors)
                if grad_out.is_floating_point():
                    runs = [self.backward(grad_out, *tensors) for _ in range(4)]
                    assert all(all(map(torch.equal, runs[0], run)) for run in runs)
        finally:
            torch.use_deterministic_algorithms(False)

    @pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not"
    )  # opcheck's own
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_registered_operators_pass_opcheck(self, dtype, device):
        """In float32 all of it; schemas and dtypes in the others, whose graphs are the same."""
        every = {} if dtype == torch.float32 else {"test_utils": ("test_schema", "test_faketensor")}
        for suffix, arguments in self.cases(self.leaves(device, dtype)):
            torch.library.opcheck(self.raw(suffix), arguments, **every)

    @pytest.mark.filterwarnings("ignore")  # what torch.compile itself says
    def test_compiles_as_one_graph(self, device):
        leaves = self.leaves(device, torch.float32)

        def loss(first, *others):
            return self.loss(first * 2, *others)

        results = []
        compiled = torch.compile(loss, fullgraph=True, dynamic=True, options=self.inductor)
        for run in (loss, compiled):
            value = run(*leaves)
            results.append([value.detach(), *torch.autograd.grad(value, leaves)])
        assert_close(*results, **self.rounding)

    def test_function_transforms(self):
        """Members of a batch that share a tensor or share none, with gradients from within and from
        outside of it; a batch of batches, also of one.
        """
        batch = [torch.stack(x) for x in zip(*(self.small(seed=i) for i in range(3)), strict=True)]
        gradients = torch.func.grad(self.loss, argnums=tuple(range(len(batch))))
        for batched in masks(len(batch)):
            if not any(batched):
                continue
            args = [x if many else x[1] for x, many in zip(batch, batched, strict=True)]
            members = [
                [x[i] if many else x for x, many in zip(args, batched, strict=True)]
                for i in range(3)
            ]
            for function in (self.call, gradients):
                each = zip(*(several(function(*member)) for member in members), strict=True)
                dims = tuple(0 if many else None for many in batched)
                ours = several(torch.vmap(function, dims)(*args))
                assert_close([*ours], [torch.stack(x) for x in each])

            def total(*args, dims=dims):
                return torch.vmap(self.loss, dims)(*args).sum()

            # ours: of `gradients`; from outside of the batch each shared tensor gets the sum.
            outside = [x if many else x.sum(0) for x, many in zip(ours, batched, strict=True)]
            leaves = [x.detach().clone().requires_grad_() for x in args]
            assert_close([*torch.autograd.grad(total(*leaves), leaves)], outside)
            every = tuple(range(len(args)))
            assert_close([*torch.func.grad(total, argnums=every)(*args)], outside)
        for nested in ([x[None] for x in batch], [x[:, None] for x in batch]):
            ours = several(torch.vmap(torch.vmap(gradients))(*nested))
            flat = several(torch.vmap(gradients)(*batch))
            assert_close([x.squeeze() for x in ours], [x.squeeze() for x in flat])

    def test_gradients_of_several_outputs_at_once(self):
        """As torch.autograd.grad takes them with is_grads_batched=True; differentiable again, also
        where one argument alone, or the gradients that arrive, require a gradient.
        """
        tensors = [x.detach() for x in self.small()]
        for wanted in masks(len(tensors)):
            if not any(wanted):
                continue
            args = [x.clone().requires_grad_(w) for x, w in zip(tensors, wanted, strict=True)]
            leaves = [x for x in args if x.requires_grad]
            out = self.call(*args)
            given = out.detach()
            grads = torch.stack([torch.ones_like(given), given, -given]).requires_grad_()
            alone = [torch.autograd.grad(out, leaves, x, create_graph=True) for x in grads]
            exact = [torch.stack(x) for x in zip(*alone, strict=True)]
            ours = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, create_graph=True)
            assert_close([*ours], exact)
            for pair in zip(ours, exact, strict=True):
                again = [
                    torch.autograd.grad(
                        x.square().sum(),
                        [*leaves, grads],
                        retain_graph=True,
                        materialize_grads=True,
                    )
                    for x in pair
                ]
                assert_close(*again)

    def test_samples_and_benchmark_arguments_fit(self, device):
        """What an edited kernel is compared on: quick, the same each time, near the reference."""
        cases = [*self.module.samples(device)]
        assert len(cases) >= 4 and {torch.float32} < {case[0].dtype for case in cases}
        for case, again in zip(cases, self.module.samples(device), strict=True):
            for x, y in zip(case, again, strict=True):
                assert torch.equal(x, y) if isinstance(x, Tensor) else x == y
            ours, expected = self.form()(*case), self.form("_reference")(*case)
            if not ours.is_floating_point():  # a level, where the value lies between two
                assert_close(ours, expected, rtol=0, atol=1)
                continue
            eps = torch.finfo(ours.dtype).eps
            assert_close(ours, expected, rtol=4 * eps, atol=1000 * min(eps, 1.2e-7))
        assert self.form()(*self.module.benchmark(device)).numel() > 10000

    @GPU
    def test_current_stream_and_graphs(self):
        """Kernels wait for what is queued before them in the caller's stream, and can be captured."""
        for tensors in self.large("cuda"):
            expected = self.call(*tensors)
            side = torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                later = torch.zeros_like(tensors[0])
                torch.cuda._sleep(50_000_000)
                later.copy_(tensors[0])
                out = self.call(later, *tensors[1:])
            side.synchronize()
            assert torch.equal(out, expected)

            def every(tensors=tensors, grad_out=expected):
                out = self.call(*tensors)
                return (
                    (out, *self.backward(grad_out, *tensors)) if out.is_floating_point() else (out,)
                )

            for fixed in (False, True):
                torch.use_deterministic_algorithms(fixed)
                try:
                    every()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        out, *grads = every()
                    tensors[-1].mul_(0.5)
                    graph.replay()
                    expected_out, *again = every()
                    assert torch.equal(out, expected_out)
                    near = 2e-2 if tensors[0].element_size() == 2 else 1e-3
                    assert_close(grads, again, rtol=near, atol=near)
                finally:
                    torch.use_deterministic_algorithms(False)

    @GPU
    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_second_gpu(self):
        """Works on cuda:1 while cuda:0 is current, and leaves it current."""
        for dtype in (torch.float32, torch.float16):
            here = self.small("cuda:0", dtype)
            there = [x.to("cuda:1") for x in here]
            out, grad_out = self.call(*there), self.call(*here)
            assert torch.equal(out.cpu(), grad_out.cpu())
            grads, expected = self.backward(out, *there), self.backward(grad_out, *here)
            assert_close([x.cpu() for x in grads], [x.cpu() for x in expected])
        assert torch.cuda.current_device() == 0

    def wrong_tensors(self):
        """Tensors, exception and message for what no operator takes."""
        for i, name in enumerate(self.names):
            good = self.small(dtype=torch.float32)
            floats = self.dtypes if i == 0 else OperatorTests.dtypes
            for bad, kind, message in (
                (good[i].int(), RuntimeError, f"{name} must be {floats}, got int32; convert it, e.g. {name}.float()"),
                (good[i] + 0j, RuntimeError, f"{name} must be {floats}, got complex64; convert it, e.g. {name}.float()"),
                (good[i].to_sparse(), RuntimeError, f"{name} must be a dense tensor, got a sparse or packed one; use {name}.to_dense()"),
                (good[i].numpy(), TypeError, f"{name} must be a torch.Tensor, got ndarray; convert it with torch.from_numpy()"),
                ([1.0], TypeError, f"{name} must be a torch.Tensor, got list; convert it with torch.tensor()"),
                (None, TypeError, f"{name} must be a torch.Tensor, got NoneType"),
            ):  # fmt: skip
                yield [*good[:i], bad, *good[i + 1 :]], {}, kind, message

    def odd_tensors(self):
        """The same of tensors that C++ has no name for, or never sees."""
        for i, name in enumerate(self.names):
            good, kind = self.small(dtype=torch.float32), f"{name} must be {OperatorTests.dtypes}"
            for bad, message in (
                (good[i].to(torch.float8_e5m2), f"{kind}, got float8_e5m2; convert it, e.g. {name}.float()"),
                (torch.empty(good[i].shape, dtype=torch.bits8), f"{kind}, got bits8"),
                (torch.quantize_per_tensor(good[i], 0.1, 0, torch.quint8), f"{kind}, got quint8; convert it, e.g. {name}.dequantize()"),
            ):  # fmt: skip
                yield [*good[:i], bad, *good[i + 1 :]], {}, RuntimeError, message

    def bad_input(self):
        """Arguments, options, exception and message after the operator's name, of its own."""
        return ()

    @pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
    def test_bad_input_gets_one_clear_message(self):
        cases = (*self.wrong_tensors(), *self.odd_tensors(), *self.bad_input())
        for tensors, options, kind, message in cases:
            for suffix in ("", "_fw"):
                with pytest.raises(kind) as caught:
                    self.form(suffix)(*tensors, **options)
                assert type(caught.value) is kind
                assert str(caught.value) == f"{self.name}: {message}"

    def test_bad_input_of_the_backward(self):
        tensors = self.small(dtype=torch.float32)
        grad_out = self.call(*tensors)
        for change, message in self.backward_refuses:
            with pytest.raises(RuntimeError) as caught:
                self.backward(change(grad_out), *tensors)
            assert str(caught.value) == f"{self.name}: {message}"
        for bad, got in ((1.0, "float"), (None, "NoneType")):
            with pytest.raises(TypeError, match=rf"grad_out must be a torch\.Tensor, got {got}"):
                self.backward(bad, *tensors)

    @GPU
    def test_mixed_devices(self):
        first, *others = self.names
        for i, name in enumerate(others, 1):
            tensors = [x.cuda() for x in self.small(dtype=torch.float32)]
            tensors[i] = tensors[i].cpu()
            with pytest.raises(RuntimeError) as caught:
                self.call(*tensors)
            expected = f"{self.name}: {name} must be on the device of {first}, cuda:0, got cpu"
            assert str(caught.value).startswith(expected)
