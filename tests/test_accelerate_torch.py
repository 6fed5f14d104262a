"""`loader.accelerate_torch()`: torch's grid_sample on our kernels, and torch as it was afterwards."""

import itertools
import os
import textwrap

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, ended, start_python
from torch.testing import assert_close

import loader
from loader.jit.live import swap
from loader.ops import grid_sample_torch

aten = torch.ops.aten
OPERATORS = [
    *("grid_sampler", "grid_sampler_2d", "grid_sampler_2d_backward", "grid_sampler_3d"),
    *("grid_sampler_3d_backward", "cudnn_grid_sampler", "cudnn_grid_sampler_backward"),
]
OURS = "dispatcher.h"  # where the dispatcher says that a kernel of ours was registered


def dispatcher():
    """All that torch's dispatcher knows of the operators."""
    names = [f"aten::{name}" for name in OPERATORS]
    return [(torch._C._dispatch_dump(name), torch._C._dispatch_dump_table(name)) for name in names]


def kernel(name, key):
    table = torch._C._dispatch_dump_table(f"aten::{name}").split("\n")
    return next((line for line in table if line.startswith(key + ":")), "")


def run(code, **environment):
    """Code in a process of its own, where every warning is an error; what it printed."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = ended(start_python(textwrap.dedent(code), ROOT, env))
    assert done.returncode == 0, done.stderr
    assert "verrid" not in done.stderr, done.stderr
    return done.stdout


def sample(dims, device="cpu", dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {2: ((2, 5, 7, 6), (2, 4, 3, 2)), 3: ((2, 3, 4, 5, 6), (2, 3, 2, 4, 3))}[dims]
    image = torch.rand(shapes[0], generator=generator, dtype=torch.float64)
    grid = torch.rand(shapes[1], generator=generator, dtype=torch.float64) * 3 - 1.5
    return [x.to(device, dtype).requires_grad_() for x in (image, grid)]


def results(dims, device, dtype, **options):
    image, grid = sample(dims, device, dtype)
    out = F.grid_sample(image, grid, **options)
    weights = torch.linspace(0.5, 1.5, out.numel(), device=device, dtype=dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), (image, grid))]


OPTIONS = [
    {"mode": mode, "padding_mode": padding, "align_corners": corners}
    for mode, padding, corners in itertools.product(
        ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (False, True)
    )
]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_results_are_torchs(dims, dtype, device):
    """Output and both gradients, for every option; and with torch's strides."""
    for options in OPTIONS:
        try:
            expected = results(dims, device, dtype, **options)
        except RuntimeError:  # has torch from 2.15 on
            assert dims == 3 and options["mode"] == "bicubic"
            continue
        with loader.accelerate_torch():
            got = results(dims, device, dtype, **options)
        for ours, torchs in zip(got, expected, strict=True):
            # A gradient sums up to 80 products of size up to 8, each rounded a few times.
            assert_close(ours, torchs, rtol=0, atol=512 * torch.finfo(dtype).eps)
            assert ours.stride() == torchs.stride()


def test_sixteen_bits_are_the_float32_result_rounded_once():
    """Where torch computes pixel indices in the type itself, and is wrong on wide images."""
    image = torch.rand(1, 1, 1, 4000).bfloat16()
    grid = torch.stack([torch.linspace(-1, 1, 99), torch.zeros(99)], -1).bfloat16()[None, None]
    exact = F.grid_sample(image.float(), grid.float(), align_corners=False).bfloat16()
    with loader.accelerate_torch():
        assert torch.equal(F.grid_sample(image, grid, align_corners=False), exact)


def test_strides_are_torchs(device):
    """Contiguous, as the fake kernels say, whatever the layout of the image."""
    image = sample(2, device)[0].detach().contiguous(memory_format=torch.channels_last)
    grid = sample(2, device)[1].detach()
    for image_, grid_ in ((image, grid), (image[:, ::2, 1:], grid.transpose(1, 2))):
        out = aten.grid_sampler_2d(image_, grid_, 0, 0, False)
        expected = aten.grid_sampler_2d_backward(out, image_, grid_, 0, 0, False, [True, True])
        with loader.accelerate_torch():
            ours = aten.grid_sampler_2d(image_, grid_, 0, 0, False)
            got = aten.grid_sampler_2d_backward(out, image_, grid_, 0, 0, False, [True, True])
        for a, b in zip((ours, *got), (out, *expected), strict=True):
            assert a.stride() == b.stride()
            assert_close(a, b)


def test_only_gradients_asked_for():
    """As torch: no gradient of the image where not asked for, that of the grid is a tensor always."""
    image, grid = (x.detach() for x in sample(2))
    out = F.grid_sample(image, grid, align_corners=False)
    with loader.accelerate_torch():
        none, to_grid = aten.grid_sampler_2d_backward(out, image, grid, 0, 0, False, [False, True])
        to_image, zeros = aten.grid_sampler_2d_backward(
            out, image, grid, 0, 0, False, [True, False]
        )
        both = aten.grid_sampler_2d_backward(out, image, grid, 0, 0, False, [True, True])
    assert none is None and not zeros.any() and zeros.shape == grid.shape
    assert torch.equal(to_image, both[0]) and torch.equal(to_grid, both[1])


REFUSED = {
    "no number": lambda: F.grid_sample(*(x.detach().long() for x in sample(2))),
    "complex": lambda: F.grid_sample(*(x.detach().cfloat() for x in sample(2))),
    "two dtypes": lambda: F.grid_sample(sample(2)[0].half(), sample(2)[1]),
    "two dtypes, volume": lambda: F.grid_sample(sample(3)[0].double(), sample(3)[1]),
    "no pixels": lambda: F.grid_sample(torch.rand(1, 1, 0, 3), torch.rand(1, 2, 2, 2)),
    "two batch sizes": lambda: F.grid_sample(torch.rand(3, 1, 2, 3), torch.rand(2, 2, 2, 2)),
    "three dimensions": lambda: F.grid_sample(torch.rand(1, 2, 3), torch.rand(1, 2, 2)),
    "operator for images": lambda: aten.grid_sampler_2d(*sample(3), 0, 0, False),
    "operator for volumes": lambda: aten.grid_sampler_3d(*sample(2), 0, 0, False),
    "bicubic volume": lambda: F.grid_sample(*sample(3), mode="bicubic"),
    "bicubic volume, operator": lambda: aten.grid_sampler_3d(*sample(3), 2, 0, False),
    "backward, no number": lambda: aten.grid_sampler_2d_backward(
        *(torch.ones(1, 1, 1, n).long() for n in (1, 1, 2)), 0, 0, False, [True, True]
    ),
    "second derivative": lambda: torch.autograd.grad(
        torch.autograd.grad(F.grid_sample(*(xs := sample(2))).sum(), xs, create_graph=True)[
            0
        ].sum(),
        xs,
    ),
}


@pytest.mark.filterwarnings("ignore:Default grid_sample")
@pytest.mark.parametrize("case", REFUSED)
def test_what_ours_refuse_reaches_torch(case):
    """The same exception, of the same type, with the same text; or results, where torch has them."""

    def outcome():
        try:
            return REFUSED[case]()
        except Exception as error:
            return type(error), str(error).split("\nException raised from")[0]

    expected = outcome()
    with loader.accelerate_torch():
        got = outcome()
    if isinstance(expected, torch.Tensor):  # as torch has it from 2.15 on
        assert case.startswith("bicubic volume")
        assert_close(got, expected)
    else:
        assert got == expected


@pytest.mark.filterwarnings("ignore:Default grid_sample")
def test_empty_batches_and_channels():
    for image, grid in (
        ((0, 0, 3), (0, 2, 2, 2)),
        ((2, 0, 3), (2, 2, 2, 2)),
        ((2, 1, 3), (2, 0, 2, 2)),
    ):
        image, grid = torch.rand(*image, 4).requires_grad_(), torch.rand(grid).requires_grad_()
        with loader.accelerate_torch():
            out = F.grid_sample(image, grid)
            out.sum().backward()
        assert out.shape == (*image.shape[:2], *grid.shape[1:3])
        assert not image.grad.any() and not grid.grad.any()


def test_leaving_restores_torch():
    """The dispatcher knows what it knew; also after an error, and when the last of several ends."""
    before, code = dispatcher(), F.grid_sample.__code__
    with loader.accelerate_torch() as outer:
        assert OURS in kernel("grid_sampler_2d", "CPU")
        assert outer.devices[0] == "cpu" and "cpu" in repr(outer)
        during = dispatcher()
        with pytest.raises(ZeroDivisionError), loader.accelerate_torch():
            raise ZeroDivisionError
        assert dispatcher() == during
    assert dispatcher() == before and F.grid_sample.__code__ is code
    assert outer.devices == () and "closed" in repr(outer)
    once = loader.accelerate_torch()
    with once:
        assert OURS in kernel("grid_sampler_3d_backward", "CPU")
    once.close()
    with once:
        assert OURS in kernel("grid_sampler_3d_backward", "CPU")
    assert dispatcher() == before and F.grid_sample.__code__ is code


def test_each_device_of_the_build_is_covered():
    with loader.accelerate_torch() as inside:
        for key in ("CPU", "CUDA"):
            for name in OPERATORS[1:]:
                if key == "CUDA" or "cudnn" not in name:
                    assert (OURS in kernel(name, key)) == (key.lower() in inside.devices)
        for key in ("Meta", "MPS", "XPU", "AutogradCPU", "AutocastCPU"):
            assert OURS not in kernel("grid_sampler_2d", key)


def test_cudas_kernels_hand_on_what_they_refuse():
    """Reached without a GPU, as the error comes before any work."""
    ints = torch.ones(1, 1, 1, 1).long(), torch.ones(1, 1, 1, 2).long()
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with loader.accelerate_torch() as inside:
        if "cuda" not in inside.devices:
            pytest.skip("this build is for the CPU only")
        with pytest.raises(NotImplementedError, match='"grid_sampler_2d_cuda" not implemented'):
            aten.grid_sampler_2d.default.redispatch(keys, *ints, 0, 0, False)


def test_it_stays_on_without_a_block_and_warns_of_nothing():
    """In a fresh process, as torch warns of the first override of a kernel alone, if at all. One by
    somebody else is still warned of where it is without us.
    """
    begin = """
        import gc, torch, warnings, loader
        loader.accelerate_torch()
        gc.collect()
        print("dispatcher.h" in torch._C._dispatch_dump_table("aten::grid_sampler_2d"))
        """
    override = """
        import torch, warnings
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            library.impl("sin", lambda x: x, "CPU")
        print(any("verrid" in str(w.message) for w in said), torch.is_warn_always_enabled())
        """
    warned, always = run(override).split()
    assert run(begin + override).split() == ["True", warned, always] and always == "False"


def test_autocast_vmap_meta_and_functional_gradients_are_torchs():
    image, grid = sample(2)
    images = torch.stack([image.detach(), image.detach() / 2])

    def derive(image):
        return F.grid_sample(image, grid.detach(), align_corners=False).sin().sum()

    def outcomes():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = F.grid_sample(image.bfloat16(), grid, align_corners=False)
        many = torch.func.vmap(lambda x: F.grid_sample(x, grid, align_corners=False))(images)
        each = torch.func.vmap(torch.func.grad(derive))(images)
        return [mixed, many, each]

    expected = outcomes()
    with loader.accelerate_torch():
        assert_close(outcomes(), expected)
        meta = F.grid_sample(image.to("meta"), grid.to("meta"), align_corners=False)
    assert meta.shape == (2, 5, 4, 3)


def test_gradcheck():
    image, grid = sample(2, dtype=torch.float64)
    with loader.accelerate_torch():
        torch.autograd.gradcheck(
            lambda x, g: F.grid_sample(x, g, align_corners=True), (image, grid)
        )


COMPILED = """
    import torch, torch.nn.functional as F, loader
    from torch._dynamo.utils import counters

    class Sampler(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.grid = torch.nn.Parameter(torch.rand(2, 5, 5, 2) * 2 - 1)

        def forward(self, x):
            return F.grid_sample(x, self.grid, align_corners=False)

    def calls(run):
        with torch.profiler.profile(acc_events=True) as profile:
            run()
        names = [event.key for event in profile.key_averages() for _ in range(event.count)]
        return sorted(name.split("::")[1] for name in names if "grid_sampler" in name)

    def step(model):
        model.zero_grad()
        out = model(x)
        out.backward(weights)
        return out.detach(), sampler.grid.grad

    x, weights = torch.rand(2, 3, 9, 9), torch.rand(2, 3, 5, 5)
    sampler = Sampler()
    expected = step(sampler)

    def compiled(model):  # torch's kernels for what is around it: to compile C++ takes long
        return torch.compile(model, fullgraph=True, options={"disable_cpp_codegen": True})

    def check(model):
        torch.testing.assert_close(step(model), expected)
        print(*calls(lambda: step(model)))
"""
BEFORE = """
    model = compiled(sampler)
    check(model)
    with loader.accelerate_torch():
        check(model)
    frames = counters["frames"]["total"]
    check(model)
    with loader.accelerate_torch():
        check(model)
    print(counters["frames"]["total"] - frames, repr(torch.compiler.config.cache_key_tag))
"""
WITHIN = """
    import sys
    from torch._inductor.compiler_bisector import CompilerBisector  # all but what is to be changed
    with loader.accelerate_torch():
        print("torch._inductor.lowering" in sys.modules)
        check(compiled(sampler))
    print(any("accelerate" in str(finder) for finder in sys.meta_path))
    from torch._inductor.decomposition import decompositions, select_decomp_table
    operator = torch.ops.aten.grid_sampler_2d.default
    print(operator in decompositions, operator in select_decomp_table())
"""
OURS_CALLED = "grid_sampler_2d grid_sampler_2d_backward"


def run_compiled(code, folder):
    return run(
        textwrap.dedent(COMPILED) + textwrap.dedent(code),
        CUDA_VISIBLE_DEVICES="",
        TORCHINDUCTOR_CACHE_DIR=str(folder),
        TORCHINDUCTOR_VEC_ISA_OK="1",
        TORCHINDUCTOR_COMPILE_THREADS="1",
    ).splitlines()


def test_a_function_compiled_before_runs_the_kernels(tmp_path):
    """Forward and backward, within the block alone; each version is compiled once, and none is
    taken for the other from the cache on disk.
    """
    outside = "grid_sampler_2d_backward"  # the forward is arithmetic on pixels
    expected = [outside, OURS_CALLED, outside, OURS_CALLED, "0 ''"]
    assert run_compiled(BEFORE, tmp_path) == expected


def test_a_function_compiled_within_runs_the_kernels(tmp_path):
    """Also where Inductor is imported only then; afterwards it writes the operator out again."""
    assert run_compiled(WITHIN, tmp_path) == ["False", OURS_CALLED, "False", "True True"]


def test_an_edit_of_the_operator_is_followed():
    """What torch calls is registered anew, once, from the library that is in use then."""
    before = dispatcher()
    with loader.accelerate_torch():
        first = dispatcher()
        handles = grid_sample_torch._kernels.handles
        swap._follow()
        assert grid_sample_torch._kernels.handles != handles
        assert [len(text) for text, _ in dispatcher()] == [len(text) for text, _ in first]
    swap._follow()
    assert dispatcher() == before


def test_a_forked_child_may_end_it():
    out = run("""
        import os, torch, loader
        inside = loader.accelerate_torch()
        if os.fork() == 0:
            inside.close()
            os._exit("dispatcher.h" in torch._C._dispatch_dump("aten::grid_sampler_2d"))
        print(os.wait()[1], "dispatcher.h" in torch._C._dispatch_dump("aten::grid_sampler_2d"))
        """)
    assert out.split() == ["0", "True"]


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore")  # what the profiler says of itself
def test_cudnns_operators_are_covered():
    """Bilinear, zeros outside, aligned corners: what torch gives cuDNN."""
    options = {"mode": "bilinear", "padding_mode": "zeros", "align_corners": True}
    expected = results(2, "cuda", torch.float32, **options)
    with loader.accelerate_torch(), torch.profiler.profile() as profile:
        got = results(2, "cuda", torch.float32, **options)
    assert any("cudnn_grid_sampler" in event.key for event in profile.key_averages())
    assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
def test_deterministic_algorithms_do_not_raise():
    """Torch has no deterministic backward on CUDA; ours gives the same bits twice."""
    image = torch.rand(1, 4, 9, 9, device="cuda", requires_grad=True)
    grid = torch.rand(1, 300, 300, 2, device="cuda", requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        with loader.accelerate_torch():
            runs = []
            for _ in range(2):
                out = F.grid_sample(image, grid, align_corners=False)
                runs.append(torch.autograd.grad(out.square().sum(), (image, grid)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore")  # what Inductor says of itself
@pytest.mark.parametrize("corners", [False, True])
def test_compiled_on_cuda(corners, tmp_path):
    image, grid = sample(2, "cuda")

    def sampled(image, grid):
        return F.grid_sample(image, grid, align_corners=corners) * 2

    with loader.accelerate_torch():
        expected = torch.autograd.grad(sampled(image, grid).sum(), (image, grid))
        out = torch.compile(sampled)(image, grid)
        assert_close(torch.autograd.grad(out.sum(), (image, grid)), expected)
