"""`loader.nn`: the operators as modules, used as torch's own modules are."""

import copy
import io
import pickle

import pytest
import torch
from torch.testing import assert_close

import loader
from loader.nn import (
    LUT3D,
    BilinearInterpolation,
    Convolve2d,
    GridSample,
    HashGridEncoding,
    TrilinearInterpolation,
)

GRIDS = {"levels": 3, "features": 4, "table_size": 1 << 8, "per_level_scale": 1.5}
MODULES = {
    "trilinear": (TrilinearInterpolation, lambda: (torch.randn(5, 8, 3), torch.rand(5, 3))),
    "bilinear": (BilinearInterpolation, lambda: (torch.randn(5, 4, 3), torch.rand(5, 2))),
    "grid_sample": (
        lambda **k: GridSample("bicubic", "border", True),
        lambda: (torch.randn(1, 2, 6, 7), torch.rand(1, 3, 4, 2) * 2 - 1),
    ),
    "lut": (lambda **k: LUT3D(5, "tetrahedral", **k), lambda: (torch.rand(4, 6, 3),)),
    "convolve": (
        lambda **k: Convolve2d((3, 5), boundary="reflect", **k),
        lambda: (torch.rand(9, 8),),
    ),
    "hash": (lambda **k: HashGridEncoding(2, **GRIDS, **k), lambda: (torch.rand(11, 2),)),
}
WITH_PARAMETERS = ["lut", "convolve", "hash"]


@pytest.fixture(params=MODULES)
def case(request):
    make, arguments = MODULES[request.param]
    torch.manual_seed(0)
    return make(), arguments()


@pytest.fixture(params=WITH_PARAMETERS)
def made(request):
    return MODULES[request.param]


def test_it_is_the_operator(case):
    module, arguments = case
    expected = {
        TrilinearInterpolation: lambda m: loader.trilinear_interpolation(*arguments),
        BilinearInterpolation: lambda m: loader.bilinear_interpolation(*arguments),
        GridSample: lambda m: loader.grid_sample(*arguments, "bicubic", "border", True),
        LUT3D: lambda m: loader.apply_lut3d(*arguments, m.lut, "tetrahedral"),
        Convolve2d: lambda m: loader.convolve2d(*arguments, m.kernel, boundary="reflect"),
        HashGridEncoding: lambda m: loader.hash_grid_encoding(
            *arguments, m.table, base_resolution=16, per_level_scale=1.5
        ),
    }[type(module)](module)
    assert torch.equal(module(*arguments), expected)


def test_copies_and_archives_give_the_same(case):
    module, arguments = case
    expected, archive = module(*arguments), io.BytesIO()
    assert torch.equal(copy.deepcopy(module)(*arguments), expected)
    torch.save(module, archive)
    archive.seek(0)
    assert torch.equal(torch.load(archive, weights_only=False)(*arguments), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own
def test_torch_fx_traces_it(case):
    """As it does torch.nn's; what it makes of them is archived, and torch.func takes it, too."""
    module, arguments = case
    traced = torch.fx.symbolic_trace(module)
    called = [node.target.__module__ for node in traced.graph.nodes if callable(node.target)]
    assert sum(name.startswith("loader.ops.") for name in called) == 1
    results = []
    for run in (module, traced, pickle.loads(pickle.dumps(traced))):
        leaves = [x.clone().requires_grad_() for x in arguments]
        out = run(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))
    for run in (module, traced):
        slopes = torch.func.grad(lambda x, run=run: run(x, *arguments[1:]).square().sum())
        assert_close(slopes(arguments[0]), results[0][1])
        _, tangent = torch.func.jvp(run, arguments, tuple(map(torch.ones_like, arguments)))
        assert tangent.any()


def test_parameters_are_learnt(made):
    module, arguments = made[0](), made[1]()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    target = torch.rand_like(module(*arguments))
    losses = []
    for _ in range(3):
        loss = (module(*arguments) - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


def test_state_made_without_data_and_filled_later(made):
    make, arguments = made
    torch.manual_seed(3)
    module = make(dtype=torch.float64)
    arguments = arguments()
    with torch.device("meta"):
        later = make(dtype=torch.float64)
    assert all(p.is_meta and p.dtype == torch.float64 for p in later.parameters())
    later = later.to_empty(device="cpu")
    torch.manual_seed(3)
    later.reset_parameters()
    assert all(map(torch.equal, later.parameters(), module.parameters()))
    other = make(dtype=torch.float64)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(*arguments), module(*arguments))


def test_what_a_table_and_a_kernel_do_in_the_beginning():
    image = torch.rand(7, 6, 3)
    for interpolation in ("trilinear", "tetrahedral"):
        torch.testing.assert_close(LUT3D(17, interpolation)(image), image)
    for size in (1, 2, (3, 5), (4, 1)):
        assert torch.equal(Convolve2d(size)(image[..., 0]), image[..., 0])


def test_a_table_that_is_given_is_copied():
    lut = torch.rand(4, 4, 4, 3, dtype=torch.float64)
    module = LUT3D.from_table(lut, "tetrahedral")
    assert torch.equal(module.lut, lut) and module.lut.data_ptr() != lut.data_ptr()
    assert module.lut.dtype == torch.float64 and module.interpolation == "tetrahedral"


def test_points_of_any_number_of_dimensions():
    module = HashGridEncoding(3, **GRIDS)
    points = torch.rand(2, 5, 3, 3)
    out = module(points)
    assert out.shape == (2, 5, 3, module.out_features) and module.out_features == 12
    assert torch.equal(out[1, 2], module(points[1, 2]))
    assert torch.equal(module(points[0, 0, 0]), out[0, 0, 0])
    traced = torch.fx.symbolic_trace(module)
    for some in (points, points[1, 2], points[0, 0, 0]):
        assert torch.equal(traced(some), module(some))
    with pytest.raises(RuntimeError, match="unflatten"):
        traced(torch.rand(6, 4))


def test_what_does_not_fit_is_told():
    with pytest.raises(ValueError, match="dims must be 2 or 3, got 4"):
        HashGridEncoding(4)
    with pytest.raises(RuntimeError, match=r"points must be \(\.\.\., 2\), got \(5, 3\)"):
        HashGridEncoding(2, **GRIDS)(torch.rand(5, 3))
    with pytest.raises(ValueError, match="mode must be"):
        GridSample("cubic")(torch.rand(1, 1, 2, 2), torch.rand(1, 1, 1, 2))


@pytest.mark.parametrize("points", [[[0.1, 0.2]], None, torch.rand(3, 2).numpy()], ids=type)
def test_what_is_no_tensor_is_told_in_the_operators_words(points):
    with pytest.raises(
        TypeError, match=r"^hash_grid_encoding: points must be a torch\.Tensor, got"
    ):
        HashGridEncoding(2, **GRIDS)(points)


def test_a_traced_module_is_promoted_by_autocast():
    traced = torch.fx.symbolic_trace(GridSample())
    image, grid = torch.rand(1, 2, 4, 4).half(), torch.rand(1, 3, 3, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert traced(image, grid).dtype == torch.float32
        assert torch.equal(torch.fx.symbolic_trace(GridSample())(image, grid), traced(image, grid))
    assert traced(image, grid).dtype == torch.float16


def test_it_prints_its_options():
    assert repr(GridSample("nearest")) == (
        "GridSample(mode='nearest', padding_mode='zeros', align_corners=None)"
    )
    assert repr(LUT3D(3)) == "LUT3D(3, interpolation='trilinear')"
    assert repr(Convolve2d(3)) == "Convolve2d((3, 3), mode='same', boundary='zero')"
    assert "levels=3, features=4, table_size=256" in repr(HashGridEncoding(2, **GRIDS))


def test_it_compiles_as_one_graph():
    module = torch.nn.Sequential(HashGridEncoding(2, **GRIDS), torch.nn.Linear(12, 3), LUT3D(4))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    points = torch.rand(6, 2)
    torch.testing.assert_close(compiled(points), module(points))


def test_it_is_not_imported_unasked(built):
    code = "import sys, loader; assert 'loader.nn' not in sys.modules; loader.nn.GridSample()"
    done = built.run(code + "; import loader.nn; assert sys.modules['loader.nn'] is loader.nn")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["square", "grid_sample", "hash_grid_encoding", "apply_lut3d"])
@pytest.mark.parametrize("suffix", ["", "_fw", "_bw", "_reference"])
def test_operators_themselves_are_pickled_by_name(name, suffix):
    form = getattr(loader, name + suffix)
    assert pickle.loads(pickle.dumps(form)) is form and copy.deepcopy(form) is form
