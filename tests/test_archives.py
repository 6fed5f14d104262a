"""Programs stored by torch.export, TorchScript and AOTInductor, which call the operators later.

They run in a new process that has said `import loader`, and in one that has not and loads the built
libraries instead, as a server without a compiler does.
"""

import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import loader

RUN = """
import sys, torch
torch.set_num_threads(1)
folder, *libraries = sys.argv[1:]
for library in libraries:
    torch.ops.load_library(library)
if not libraries:
    import loader
arguments, expected = torch.load(f"{folder}/values.pt")
programs = {
    "exported": lambda: torch.export.load(f"{folder}/exported.pt2").module(),
    "traced": lambda: torch.jit.load(f"{folder}/traced.pt"),
}
for name, load in programs.items():
    for ours, theirs in zip(load()(*arguments), expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs)
import torch._inductor.codecache  # which 2.10 takes for imported

print("loaded", flush=True)
run = torch._inductor.aoti_load_package(f"{folder}/compiled.pt2")
assert torch.equal(run(torch.tensor([3.0, 4.0])), torch.tensor([9.0, 16.0]))
assert ("loader" in sys.modules) == (not libraries)
print("done")
"""


TORCH_ALONE = """
import torch
class Squared(torch.nn.Module):
    def forward(self, x):
        return x * x
program = torch.export.export(Squared(), (torch.rand(2),))
run = torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program))
assert torch.equal(run(torch.tensor([3.0, 4.0])), torch.tensor([9.0, 16.0]))
"""


class Every(torch.nn.Module):
    """One call of each operator, one with a parameter."""

    def __init__(self):
        super().__init__()
        self.encoding = loader.nn.HashGridEncoding(3, levels=2, table_size=64)

    def forward(self, feats, points, image, grid, lut):
        deep = loader.trilinear_interpolation(feats, points)
        flat = loader.bilinear_interpolation(feats[:, :4], points[:, :2])
        return (
            loader.add2(deep, flat),
            loader.square(deep),
            loader.grid_sample(image, grid, "bicubic", align_corners=False),
            loader.apply_lut3d(image[0].permute(1, 2, 0), lut, "tetrahedral"),
            loader.convolve2d(image[0], lut[0, :, :, 0]),
            self.encoding(points),
        )


class Squared(torch.nn.Module):
    """AOTInductor compiles C++ for half a minute, however much there is of it."""

    def forward(self, x):
        return loader.square(x)


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, its archives are about
        yield stored(tmp_path_factory.mktemp("archives"))


def stored(folder):
    """A folder with arguments, results, and programs that give these."""
    torch.manual_seed(0)
    arguments = (
        torch.randn(5, 8, 4),
        torch.rand(5, 3),
        torch.rand(1, 3, 8, 9),
        torch.rand(1, 4, 5, 2) * 2 - 1,
        torch.rand(3, 3, 3, 3),
    )
    module = Every().requires_grad_(False)
    torch.save((arguments, [x.detach() for x in module(*arguments)]), folder / "values.pt")
    torch.export.save(torch.export.export(module, arguments), folder / "exported.pt2")
    torch.jit.trace(module, arguments).save(folder / "traced.pt")
    quickly = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    quickly["aot_inductor.precompile_headers"] = False  # for one program
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(quickly):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        torch._inductor.aoti_compile_and_package(
            torch.export.export(Squared(), (torch.rand(2),)),
            package_path=str(folder / "compiled.pt2"),
        )
    return folder


@pytest.mark.parametrize("way", ["after import loader", "by its libraries alone"])
def test_stored_programs_run_in_a_new_process(way, archives, monkeypatch):
    libraries = []
    if way != "after import loader":
        lines = Path("/proc/self/maps").read_text().splitlines()
        ours = tuple(f"{cache.resolve()}/" for cache in loader._session.caches)
        mapped = (line.split(maxsplit=5)[-1] for line in lines if line.endswith("/library.so"))
        libraries = [library for library in mapped if library.startswith(ours)]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(archives / "inductor"))
    monkeypatch.setenv("LOADER_BUILD", "never")
    done = run(RUN, archives, *dict.fromkeys(libraries), folder=archives if libraries else ROOT)
    if (done.returncode, done.stdout) == (-signal.SIGSEGV, "loaded\n"):
        alone = run(TORCH_ALONE, folder=archives)
        if alone.returncode == -signal.SIGSEGV:
            pytest.skip("programs of AOTInductor end by a signal here, without loader too")
    assert done.returncode == 0 and done.stdout == "loaded\ndone\n", done.stderr


def run(code, *arguments, folder):
    """Run code in a new Python."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
