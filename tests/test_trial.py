"""What a trial lets in and what it does not: of every operator, on every source file of it."""

import contextlib
import copy
import functools
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, Checkout
from living import FORWARD, Living
from torch import Tensor

import loader
from loader.jit.live.compare import Comparison
from loader.jit.live.trial import Verdict

UNITS = sorted(file.stem for file in (ROOT / "ops").glob("*.cpp"))


def living(folder, unit: str, **changes) -> Living:
    """A process with one operator, in a copy of the sources; a comment costs no compilation."""
    checkout = Checkout(folder, only=unit)
    given = checkout.environment
    checkout.environment = lambda **more: given(**changes, **more)
    process = Living(checkout)
    process(f"import loader; loader.{unit}")
    return process


@pytest.mark.parametrize("unit", UNITS)
def test_a_comment_is_let_in_wherever_it_stands(unit, tmp_path):
    """In every file of an operator, those of CUDA too where there is nvcc.

    Of one operator headers and sources come one after the other, of the others all at once.
    """
    with_cuda = bool(shutil.which("nvcc"))
    process = living(tmp_path, unit, TORCH_CUDA_ARCH_LIST="9.0" if with_cuda else None)
    try:
        process("from loader.jit.live.reload import reloader; reloader.stand_by()")
        process("print(loader.reload())")
        made_of = process(
            f"s = loader._session; print(*s.store.manifest({unit!r}, s.loaded[{unit!r}])"
            "['inputs']['files'])"
        ).split()
        headers = [path for path in made_of if path.endswith((".h", ".cuh"))]
        sources = [path for path in made_of if path.endswith((".cpp", ".cu")[: 1 + with_cuda])]
        compiled = {*loader._session.units[unit].sources}
        assert headers and any(path.startswith("kernels/") for path in sources)
        assert {*sources} == {path for path in compiled if with_cuda or path.endswith(".cpp")}
        alone = unit == "bilinear_interpolation"
        groups = [headers, *([path] for path in sources)] if alone else [headers + sources]
        for group in (*groups, [f"ops/{unit}.py"]):
            let_in_comments(process, group)
    finally:
        process.end()


def let_in_comments(process: Living, group: list[str]) -> None:
    """Append a comment to these files, and have all that is edited be in use."""
    for path in group:
        with open(process.checkout.root / path, "a") as file:
            file.write(f"{'#' if path.endswith('.py') else '//'} a comment\n")
    shown = process("r = loader.reload(time_limit=60); print([e.outcome for e in r.edits], r)")
    assert shown.startswith("['live']"), f"{group}: {shown}"
    assert all(path in shown for path in group), shown
    assert "compared" not in shown and "refused" not in shown, shown


@pytest.fixture(scope="module")
def square(tmp_path_factory):
    # What stands by is a process of its own here, as a user's is; elsewhere see standby.py.
    process = living(tmp_path_factory.mktemp("square"), "square", OCTET_STANDBY=None)
    process("import torch; x = torch.arange(4.); f = loader.square; f(x)")
    process("print(loader.reload())")
    yield process
    process.end()


CPU, HEADER, SIDE = "kernels/square_cpu.cpp", "include/square.h", "ops/square.py"
MADE = "elementwise(square, square_reference)\n"
FAKE = (
    "import torch\nfrom loader.jit.operators.frame import fake, registered\n"
    "fake(registered('square'), lambda x: "
)
WRONG = {
    "1e-3 too large": (HEADER, "return x * x;", "return x * x + A(0.001);"),
    "small values flushed": (HEADER, "return x * x;", "return x * x < A(1e-3) ? A(0) : x * x;"),
    "tiny values flushed": (HEADER, "return x * x;", "return x * x < A(1e-6) ? A(0) : x * x;"),
    "one element": (
        CPU,
        FORWARD,
        FORWARD + " if (p->dtype == DType::kFloat && begin <= 7 && 7 < end) "
        "static_cast<float*>(p->out[0])[7] *= 1.00002f;",
    ),
    "other strides not seen": (
        CPU,
        FORWARD,
        "ElementwiseParams q = *p; for (int d = 0; d < q.dims; ++d) q.in_stride[0][d] = "
        "q.out_stride[0][d]; elementwise_cpu<Square>(q, begin, end);",
    ),
    "last element unwritten": (
        CPU,
        FORWARD,
        "elementwise_cpu<Square>(*p, begin, end - (end == p->numel));",
    ),
    "NaN": (HEADER, "return x * x;", 'return x > A(3) ? A(__builtin_nan("")) : x * x;'),
    "second derivative": (SIDE, "square_reference)\n", "lambda x: x * x * x)\n"),
    "strides of the fake": (SIDE, MADE, f"{MADE}{FAKE}x.new_empty(x.shape))\n"),
    "dtype of the fake": (SIDE, MADE, f"{MADE}{FAKE}torch.empty_like(x, dtype=torch.float64))\n"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_kernel_is_refused(what, square):
    path, old, new = WRONG[what]
    square.edit(path, old, new)
    try:
        shown = square("r = loader.reload(); print([e.outcome for e in r.edits], r)")
        assert shown.startswith("['refused']"), shown
    finally:
        square.restore()


@pytest.mark.parametrize(
    "new", ["A(__builtin_fma(x, x, 0))", "x * x + A(0)", "x * A(0.5) * x * A(2)"]
)
def test_a_harmless_formula_is_let_in(new, square):
    square.edit(HEADER, "return x * x;", f"return {new};")
    try:
        shown = square("r = loader.reload(); print([e.outcome for e in r.edits], r)")
        assert shown.startswith("['live']"), shown
    finally:
        square.restore()


def comparison(unit: str, operator, samples, reference=None) -> Comparison:
    """Of an operator, or something else in its place, with its reference."""
    reference = reference or getattr(loader._session.module(unit), f"{unit}_reference")
    parts = {unit: operator, f"{unit}_reference": reference, "samples": samples}
    return Comparison(SimpleNamespace(**parts), unit, ["cpu"])


def tried(unit: str, operator=None, samples=None) -> Verdict:
    """The verdict on something else in the place of an operator or its samples."""
    side = loader._session.module(unit)
    return comparison(unit, operator or getattr(side, unit), samples or side.samples).verdict()


def elementwise(change):
    """A mistake in the first result, where that is of floating numbers."""

    def mistaken(function):
        def operator(*arguments):
            out = function(*arguments)
            return change(out) if out.is_floating_point() and out.numel() else out

        return operator

    return mistaken


def at(out: Tensor, index: int, value) -> Tensor:
    """`out` with `value(x)` in the place of one element."""
    flat = out.flatten()
    one = torch.arange(len(flat), device=out.device) == index % len(flat)
    return torch.where(one, value(flat), flat).view_as(out)


def blind_to_strides(function):
    """Reads its first argument as if it were dense."""

    def operator(first, *others):
        dense = torch.empty(first.shape).stride()
        return function(first.as_strided(first.shape, dense), *others)

    return operator


def other_strides(function):
    """Gives what the fake kernel does not say."""

    def operator(*arguments):
        out = function(*arguments)
        if isinstance(out, torch._subclasses.FakeTensor) or out.dim() < 2:
            return out
        turned = out.transpose(0, -1).contiguous().transpose(0, -1)
        return torch.empty_strided(out.shape, [2 * s for s in out.stride()]).copy_(turned)

    return operator


def overwriting(function):
    """Leaves zeros in its first argument."""

    def operator(first, *others):
        out = function(first, *others)
        first.data.zero_()
        return out

    return operator


class Twice(torch.autograd.Function):
    """The identity, whose second derivative is a thousandth too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return TooLarge.apply(grad)


class TooLarge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad):
        return grad.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.001


MISTAKES = {
    "1e-3 too large": elementwise(lambda out: out + 1e-3),
    "a factor of 1.0001": elementwise(lambda out: out * 1.0001),
    "small values flushed": elementwise(lambda out: torch.where(out.abs() < 1e-3, 0 * out, out)),
    "one element": elementwise(lambda out: at(out, len(out) // 2, lambda x: x + 1e-3)),
    "last element unwritten": elementwise(lambda out: at(out, -1, lambda x: x * torch.nan)),
    "last element zero": elementwise(lambda out: at(out, -1, lambda x: 0 * x)),
    "first and second swapped": elementwise(
        lambda out: at(at(out, 0, lambda x: x[1 % len(x)]), 1, lambda x: out.flatten()[0])
    ),
    "strides of the argument": blind_to_strides,
    "strides of the result": other_strides,
    "argument overwritten": overwriting,
    "second derivative": elementwise(Twice.apply),
}


@pytest.mark.parametrize("unit", UNITS)
def test_mistakes_in_every_operator_are_refused(unit):
    """The reference is asked once, before there is a library, as in a trial; then comes each."""
    right, side = getattr(loader, unit), loader._session.module(unit)
    prepared = comparison(unit, right, side.samples)
    prepared.prepare(lambda: False)
    fakes = [vars(sample).get("_fakes") for sample in prepared._samples["cpu"]]
    for what, mistaken in MISTAKES.items():
        attempt = copy.deepcopy(prepared, {id(x): x for x in fakes})  # but fake tensors
        attempt.operator = mistaken(right)
        for sample in attempt._samples["cpu"]:
            sample._known_for, known = None, sample._known_for
            with contextlib.suppress(Exception):  # as `prepare` does: all is asked once more
                sample._ask_fakes(sample._twice)
                sample._known_for = known
        verdict = attempt.verdict()
        assert verdict.outcome == "wrong", f"{what}: {verdict}"


@functools.cache
def found(unit: str) -> Verdict:
    """The verdict on an operator as it is."""
    return tried(unit)


@pytest.mark.parametrize("unit", UNITS)
def test_every_operator_is_right_twice_differentiated_and_tried_in_other_layouts(unit):
    verdict = found(unit)
    assert verdict.outcome == "right", verdict
    assert not [text for text in verdict.notes if "second" in text or "strides" in text], verdict


@pytest.mark.parametrize("unit", UNITS)
def test_another_formula_in_the_same_dtype_is_let_in(unit):
    """The reference in float32, bfloat16 ...: other operations, in another order."""
    reference = getattr(loader, f"{unit}_reference")

    def again(*arguments):
        out = reference(*arguments)
        like = getattr(loader, unit)(*arguments)  # for its strides
        return torch.empty_strided(out.shape, like.stride(), dtype=out.dtype).copy_(out)

    verdict = tried(unit, again)
    assert verdict.outcome == "right", verdict


def test_torchs_own_grid_sample_is_let_in():
    def sample(input, grid, mode="bilinear", padding_mode="zeros", align_corners=False):
        work = torch.promote_types(input.dtype, grid.dtype)
        if mode == "bicubic" and input.dim() == 5:  # torch has it from 2.15 on
            options = mode, padding_mode, align_corners
            return loader.grid_sample_reference(input.to(work), grid, *options).to(input.dtype)
        out = F.grid_sample(
            input.to(work), grid.to(work), mode, padding_mode, align_corners=bool(align_corners)
        )
        return out.to(input.dtype)

    verdict = tried("grid_sample", sample)
    assert verdict.outcome == "right", verdict


@pytest.mark.parametrize("unit", UNITS)
def test_what_the_reference_gave_before_the_library_came_serves_once_it_is_there(unit):
    side, asked = loader._session.module(unit), []

    def reference(*arguments):
        asked.append(arguments)
        return getattr(side, f"{unit}_reference")(*arguments)

    prepared = comparison(unit, getattr(side, unit), side.samples, reference)
    prepared.prepare(lambda: False)
    before = len(asked)
    assert prepared.verdict() == found(unit)
    assert len(asked) - before <= before // 4


def dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum()


def one_after_the_other(x: Tensor, y: Tensor) -> Tensor:
    """The same sum, its terms added in their order."""
    return (x * y).cumsum(0)[-1]


def pairs(device):
    make = torch.Generator(device).manual_seed(0)
    yield torch.randn(20000, generator=make), torch.randn(20000, generator=make)


def test_a_sum_in_another_order_is_let_in_and_one_without_a_term_is_not():
    module = SimpleNamespace(dot_reference=dot, samples=pairs, dot=one_after_the_other)
    assert Comparison(module, "dot", ["cpu"]).verdict().outcome == "right"
    module.dot = lambda x, y: dot(x[1:], y[1:])
    assert Comparison(module, "dot", ["cpu"]).verdict().outcome == "wrong"


def test_levels_of_integers_may_differ_by_one_next_to_a_tie_alone():
    def level(x):
        return (x * 255 + 0.5).floor().to(torch.uint8)

    def try_on(x, function):
        module = SimpleNamespace(
            level_reference=level, samples=lambda device: [(x,)], level=function
        )
        return Comparison(module, "level", ["cpu"]).verdict().outcome

    ties = (torch.arange(255) + 0.5) / 255
    other = lambda x: (x * 255).add(0.5).mul(1 - 1e-7).floor().to(torch.uint8)  # noqa: E731
    assert not torch.equal(other(ties), level(ties))
    assert try_on(ties, other) == "right"
    assert try_on(ties, lambda x: level(x) + 1) == "wrong"
    between = torch.arange(256) / 255
    assert try_on(between, other) == "right"
    assert try_on(between, lambda x: at(level(x), 7, lambda y: y + 1)) == "wrong"


def test_samples_that_do_not_fit_are_told_of():
    side = loader._session.module("add2")
    (first, *_) = side.samples("cpu")

    def text(samples):
        verdict = tried("add2", samples=samples)
        assert verdict.outcome == "wrong"
        return verdict.text

    assert "samples('cpu') of ops/add2.py yields nothing" in text(lambda device: [])
    short = text(lambda device: [first, first[:1]])
    assert "samples('cpu') of ops/add2.py: sample 1 does not fit add2()" in short
    assert "missing a required argument: 'b'" in short
    assert "must be a tuple of arguments, got a Tensor" in text(lambda device: [first[0]])


def test_what_cannot_be_compared_is_told_of():
    """An operator without a second derivative, which takes neither strides nor empty tensors."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if not x.is_contiguous() or not x.numel():
                raise RuntimeError("x must be contiguous and hold something")
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return 2 * grad * ctx.saved_tensors[0]

    verdict = Comparison(
        SimpleNamespace(
            once=Once.apply,
            once_reference=lambda x: x * x,
            samples=lambda device: [(torch.linspace(-1, 1, 300).view(10, 30),)],
        ),
        "once",
        ["cpu"],
    ).verdict()
    assert verdict.outcome == "right", verdict
    notes = "\n".join(verdict.notes)
    for said in ("second derivatives were not compared", "other strides", "emptied"):
        assert said in notes


def test_a_difference_a_hundred_times_as_large_as_before_is_shown_in_red(square):
    verdict = Verdict("right", difference={"float32": 5e-6})
    assert verdict.alarms({"float32": 4e-8}) and not verdict.alarms({"float32": 1e-7})
    assert not verdict.alarms({})
    slack = "return x * x * (A(1) + A(sizeof(A) == 4 ? 4e-7 : 0));"
    square.edit(HEADER, "return x * x;", slack)
    try:
        square("r = loader.reload(); v = r.edits[0].before; kept = dict(v.difference)")
        square("for d in v.difference: v.difference[d] = 1e-9")
        assert "times as large" in square("print(r)")
        assert 'color:red">the largest difference' in square("print(r._repr_html_())")
        assert square("print(sorted(kept))") == "['float16', 'float32']"  # tried meanwhile
    finally:
        square.restore()
