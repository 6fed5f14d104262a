"""The three ways to build and the C++ program, for real: equal bits, and a guard at each trap."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Checkout, ended, start_program, start_python

import loader

WAYS = ("jit", "setup", "cmake")
PREFIX = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
PYTHON = f"-DPython_EXECUTABLE={sys.executable}"


class Examples(Checkout):
    """A checkout with the examples, so that what they build lands in a folder of the test."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.folder = self.root / "examples" / "three_ways"
        for name in ("three_ways", "cpp"):
            shutil.copytree(
                ROOT / "examples" / name,
                self.root / "examples" / name,
                ignore=shutil.ignore_patterns("build", "__pycache__"),
            )

    def environment(self, **changes) -> dict:
        # Bits come from the kernels; the glue around them checks and allocates.
        optimized = {"PYTHONDONTWRITEBYTECODE": 1, "OCTET_OPTIMIZE": "kernels"}
        env = super().environment(**optimized, **changes)
        return env | {"PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{env['PATH']}"}

    def call(self, *command, cwd=None, **changes) -> subprocess.CompletedProcess:
        """Run a command with the checkout's environment; stdout holds both streams."""
        return subprocess.run(
            [str(word) for word in command],
            cwd=cwd or self.root,
            env=self.environment(**changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )

    def python(self, script: str, *options, **changes) -> subprocess.CompletedProcess:
        """Run one of the example's programs."""
        return self.call(sys.executable, self.folder / script, *options, **changes)

    def use(self, script: str, *options, **changes) -> subprocess.CompletedProcess:
        """The same, begun with torch imported; the stream that ends it comes last in stdout."""
        words = [self.folder / script, *options]
        done = ended(start_program(words, self.root, self.environment(**changes)))
        streams = [done.stdout, done.stderr]
        done.stdout = "".join(streams if done.returncode else streams[::-1])
        return done

    def edit(self, file: str, old: str, new: str) -> None:
        """Change a file of the example's, which must have the text."""
        path = self.folder / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The examples after a full comparison, and what that printed."""
    examples = Examples(tmp_path_factory.mktemp("three_ways"))
    before = files(examples.root)
    examples.compared = examples.use("compare.py", "--repeats", 2)
    examples.made = files(examples.root) - before
    return examples


@pytest.fixture
def examples(tmp_path):
    return Examples(tmp_path)


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def words(text: str) -> str:
    """Text without the line breaks that CMake puts into messages."""
    return " ".join(text.split())


def test_the_three_builds_are_bit_equal(built):
    done = built.compared
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "32 outputs bit-equal in jit, setup, cmake"
    (head,) = (line for line in done.stdout.splitlines() if "plain PyTorch" in line)
    assert re.findall(r"jit|setup|cmake", head) == [*WAYS]
    for row in ("add2", "trilinear forward", "trilinear backward"):
        for size in ("small", "large"):
            (line,) = (x for x in done.stdout.splitlines() if f"{row}, {size}, cpu" in x)
            figures = [float(x.replace(",", "")) for x in re.findall(r"([\d,.]+) us", line)]
            assert len(figures) == 4 and min(figures) > 0
    for row in ("build from nothing", "build again"):
        (line,) = (x for x in done.stdout.splitlines() if row in x)
        assert len(re.findall(r"[\d.]+ s\b", line)) == 3


def test_builds_stay_in_the_build_folder_and_git_ignores_it(built):
    home = Path("examples/three_ways/build")
    made = built.made - {Path("compile_commands.json")}  # for editors, at the root, ignored too
    assert made and all(path.is_relative_to(home) for path in made)
    assert (built.folder / ".gitignore").read_text() == "/build/\n"


def test_each_way_uses_its_own_library(built):
    code = """
import sys; sys.path.insert(0, "examples/three_ways")
import torch, ways
loader = ways.load(sys.argv[1])
assert loader.add2(torch.ones(3), torch.ones(3)).tolist() == [2.0] * 3
loader.trilinear_interpolation
maps = {line.split()[-1] for line in open("/proc/self/maps") if "/build/" in line}
print(*sorted(maps))
"""
    for way in WAYS:
        named = code.replace("sys.argv[1]", repr(way))
        done = ended(start_python(named, built.root, built.environment()))
        assert done.returncode == 0, done.stderr
        libraries = done.stdout.split()
        assert len(libraries) == (2 if way == "jit" else 1)
        assert all(f"/three_ways/build/{way}/" in library for library in libraries)


def test_the_wheel_holds_the_library_and_serves_every_python(built):
    (wheel,) = (built.folder / "build/setup/wheel").glob("*.whl")
    assert wheel.name.startswith("octet_three_ways-0.1.0-cp310-abi3-")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"octet_three_ways/__init__.py", "octet_three_ways/_operators.so"} <= {*names}


def test_training_is_bit_equal_and_learns(built):
    done = built.use("train.py", "--steps", 40)
    assert done.returncode == 0, done.stdout
    digests = re.findall(r"^digest (\w+)$", done.stdout, re.MULTILINE)
    assert len(digests) == 3 and len({*digests}) == 1
    assert done.stdout.splitlines()[-1] == "losses bit-equal in jit, setup, cmake"
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[0] > 5 * losses[-1]


def test_training_fails_where_nothing_is_learnt(built):
    done = built.use("train.py", "--compiler", "cmake", "--steps", 2)
    assert done.returncode == 1 and "not learnt: the loss went from" in done.stdout


def test_comparing_fails_where_a_bit_differs(examples, built):
    """One of two builds takes a header from a folder where add2 adds 1 more."""
    shutil.copytree(built.folder / "build/jit", examples.folder / "build/jit")
    text = (examples.root / "include/add2.h").read_text()
    assert "return a + b;" in text
    (examples.root / "wrong").mkdir()
    (examples.root / "wrong/add2.h").write_text(text.replace("return a + b;", "return a + b + 1;"))
    include = '"${OCTET_ROOT}/include"'
    examples.edit("CMakeLists.txt", include, '"${OCTET_ROOT}/wrong" ' + include)
    code = """
import sys; sys.path.insert(0, "examples/three_ways")
import torch, compare, ways
build = ways.build  # of which one is there, and none is measured
ways.build = lambda way, fresh=False: build(way) if way == "cmake" and fresh else 0.0
sys.argv[1:] = ["--compiler", "jit", "cmake", "--repeats", "1"]
compare.main()
"""
    done = ended(start_python(code, examples.root, examples.environment()))
    assert done.returncode == 1
    differ = done.stderr.split("outputs differ between the builds:\n")[1].splitlines()
    assert len(differ) == 8 and all(line.startswith("add2, ") for line in differ)


def test_a_failed_build_shows_the_compilers_words(examples):
    (examples.root / "kernels/add2_cpu.cpp").write_text("int oops() { return undeclared; }\n")
    done = examples.use("compare.py", "--compiler", "cmake")
    assert done.returncode == 1 and "undeclared" in done.stdout
    assert "cmake: this failed: cmake --build" in done.stdout


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
@pytest.mark.skipif(
    (torch.version.cuda or "")[:3] != "13.",
    reason="torch builds with no nvcc of another CUDA than its own, and this one's is 13",
)
def test_the_builds_with_cuda_hold_code_for_the_gpu_named(examples):
    """Without a GPU; on the CPU they train to the same bits."""
    options = "--compiler", "setup", "cmake", "--steps", 40
    done = examples.use("train.py", *options, TORCH_CUDA_ARCH_LIST="9.0")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "losses bit-equal in setup, cmake"
    folder = examples.folder / "build"
    for library in ("setup/site/octet_three_ways/_operators.so", "cmake/octet_operators.so"):
        assert b"sm_90" in (folder / library).read_bytes()


@pytest.mark.cuda
def test_the_three_builds_are_bit_equal_on_the_gpu(examples):
    done = examples.use("compare.py", "--repeats", 3, CUDA_VISIBLE_DEVICES=None)
    assert done.returncode == 0, done.stdout
    assert "64 outputs bit-equal in jit, setup, cmake" in done.stdout
    trained = examples.use("train.py", "--device", "cuda", "--steps", 40, CUDA_VISIBLE_DEVICES=None)
    assert trained.returncode == 0, trained.stdout


def sample(shape, step):
    """What main.cpp's `sample` makes."""
    count = torch.Size(shape).numel()
    return ((step * torch.arange(count) % 1024).float() / 512 - 1).reshape(shape)


def build_program(examples, **changes) -> Path:
    """The stand-alone C++ program, built by CMake."""
    folder = examples.root / "build"
    configured = examples.call("cmake", "-S", "examples/cpp", "-B", folder, PREFIX, **changes)
    assert configured.returncode == 0 and "Warning" not in configured.stdout, configured.stdout
    done = examples.call("cmake", "--build", folder, "--parallel", 2, **changes)
    assert done.returncode == 0, done.stdout
    return folder / "octet_cpp"


def check_program(program: Path, file: Path, device: str, N: int, F: int) -> None:
    """Run it, and compare what it wrote with what Python computes from the same formula."""
    command = [program, file, device, str(N), str(F)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(re.findall(r"^(?:add2|forward|backward) +[\d.]+$", done.stdout, re.MULTILINE)) == 3
    feats, points, grad = (
        sample(shape, step).to(device)
        for shape, step in (((N, 8, F), 7919), ((N, 3), 337), ((N, F), 271))
    )
    grads = loader.trilinear_interpolation_bw(grad, feats, points, (True, True))
    expected = [loader.add2(feats, feats), loader.trilinear_interpolation(feats, points), *grads]
    assert file.read_bytes() == b"".join(x.cpu().numpy().tobytes() for x in expected)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build_program(Examples(tmp_path_factory.mktemp("cpp")))


@pytest.mark.parametrize("N, F", [(4096, 32), (257, 37)])
def test_the_cpp_program_gives_the_bits_that_python_gives(program, tmp_path, N, F):
    check_program(program, tmp_path / "out.bin", "cpu", N, F)


@pytest.mark.cuda
def test_the_cpp_program_on_the_gpu(examples, tmp_path):
    program = build_program(examples, CUDA_VISIBLE_DEVICES=None)
    check_program(program, tmp_path / "out.bin", "cuda", 4096, 32)


def test_the_cpp_program_links_no_python(program):
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    assert "octet_operators.so" in linked and "libtorch_cpu.so" in linked
    assert "python" not in re.sub(r"=> \S+", "", linked) and "not found" not in linked


def test_the_cpp_program_says_what_is_wrong(program, tmp_path):
    cases = {
        (): (2, "expected FILE [cpu|cuda] [N] [F], got 0 arguments"),
        (tmp_path / "no" / "file",): (1, "file cannot be written"),
        (tmp_path / "file", "tpu"): (1, "tpu"),
        (tmp_path / "file", "cpu", "0"): (2, "N and F must be 1 or more, got 0 and 32"),
    }
    for options, (status, message) in cases.items():
        done = subprocess.run([program, *options], capture_output=True, text=True, check=False)
        assert done.returncode == status and message in done.stderr
        assert done.stderr.startswith("octet_cpp: ") and "frame #" not in done.stderr


def fake_toolkit(folder: Path, says: str) -> Path:
    """A CUDA toolkit whose nvcc fails with these words."""
    nvcc = folder / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 1\n")
    nvcc.chmod(0o755)
    return folder / "cuda"


TOO_NEW = "host_config.h:137:2: error: #error -- unsupported GNU version! gcc versions later"


def test_trap_a_name_of_the_standard_library(examples):
    examples.edit("setup.py", 'NAME = "octet_three_ways"', 'NAME = "queue"')
    done = examples.use("setup.py", "--name")
    assert done.returncode == 1
    assert "setup.py: 'queue' is a module of Python's standard library" in done.stdout


def test_trap_two_sources_of_one_stem(examples, tmp_path):
    shutil.copy(examples.root / "kernels/add2_cpu.cpp", examples.root / "kernels/add2.cpp")
    changes = {"CUDA_HOME": fake_toolkit(tmp_path, TOO_NEW), "TORCH_CUDA_ARCH_LIST": "9.0"}
    done = examples.use("setup.py", "--name", **changes)
    assert done.returncode == 1
    assert "add2.cpp and add2.cu in" in done.stdout and "both be compiled to add2.o" in done.stdout


def test_trap_a_host_compiler_too_new_for_nvcc(examples, tmp_path):
    toolkit = fake_toolkit(tmp_path, TOO_NEW)
    changes = {"CUDA_HOME": toolkit, "CUDACXX": toolkit / "bin/nvcc", "TORCH_CUDA_ARCH_LIST": "9.0"}
    by_setup = examples.use("setup.py", "--name", **changes)
    assert by_setup.returncode == 1 and "CC=gcc-14 CXX=g++-14" in by_setup.stdout
    by_cmake = examples.call(
        "cmake", "-S", examples.folder, "-B", tmp_path / "b", PREFIX, **changes
    )
    assert by_cmake.returncode == 1 and "CUDAHOSTCXX=g++-14" in by_cmake.stdout
    for done in (by_setup, by_cmake):
        assert "unsupported GNU version" in words(done.stdout)
        assert "The host compiler is newer than this nvcc knows" in words(done.stdout)


def test_trap_no_nvcc(examples, tmp_path):
    done = examples.call(
        *("cmake", "-S", examples.folder, "-B", tmp_path / "b", PREFIX),
        TORCH_CUDA_ARCH_LIST="9.0",
        CUDACXX=tmp_path / "nvcc",
    )
    assert done.returncode == 1
    assert f"needs nvcc, and there is no {tmp_path / 'nvcc'}" in words(done.stdout)
    assert "pip install 'nvidia-cuda-nvcc==13.0.*'" in words(done.stdout)
    assert "-DOCTET_CUDA_ARCHITECTURES=" in done.stdout


def test_trap_cmake_without_the_path_to_torch(examples, tmp_path):
    done = examples.call("cmake", "-S", examples.folder, "-B", tmp_path / "b")
    assert done.returncode == 1
    assert "import torch; print(torch.utils.cmake_prefix_path)" in words(done.stdout)


def test_trap_pip_builds_without_torch(examples):
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path('setup.py')"
    done = examples.call(sys.executable, "-c", code, cwd=examples.folder)
    assert done.returncode == 1 and "pass --no-build-isolation" in done.stdout


def test_trap_before_torch(built):
    """The bare library cannot be opened; the package imports torch first."""
    site = built.folder / "build/setup/site"
    code = f"import ctypes; ctypes.CDLL('{site}/octet_three_ways/_operators.so')"
    bare = built.call(sys.executable, "-c", code)
    assert bare.returncode == 1 and "cannot open shared object file" in bare.stdout
    code = """
import octet_three_ways, sys
assert 'torch' in sys.modules
import torch
print(octet_three_ways.add2(torch.ones(2), torch.ones(2)).tolist(), torch.ops.octet.add2)
"""
    done = built.call(sys.executable, "-c", code, PYTHONPATH=site)
    assert (done.returncode, done.stdout) == (0, "[2.0, 2.0] octet.add2\n")


def test_trap_the_source_folder_instead_of_the_package(built):
    done = built.call(sys.executable, "-c", "import octet_three_ways", cwd=built.folder / "src")
    assert done.returncode == 1 and "this is the source folder, not the installed" in done.stdout


def test_trap_two_builds_in_one_process(built):
    site, library = built.folder / "build/setup/site", built.folder / "build/cmake"
    code = f"""
import sys, torch
sys.path.insert(0, '{site}')
torch.ops.load_library('{library}/octet_operators.so')
import octet_three_ways
"""
    done = ended(start_python(code, built.root, built.environment()))
    assert done.returncode == 1 and "octet::add2 is registered already" in done.stderr


def test_a_python_module_by_cmake(examples, tmp_path):
    """Linked to libtorch_python and built for the Python that has torch."""
    folder = tmp_path / "b"
    options = PREFIX, PYTHON, "-DOCTET_PYTHON_MODULE=ON"
    configured = examples.call("cmake", "-S", examples.folder, "-B", folder, *options)
    assert configured.returncode == 0, configured.stdout
    done = examples.call("cmake", "--build", folder, "--parallel", 2)
    assert done.returncode == 0, done.stdout
    code = f"""
import sys, torch
sys.path.insert(0, '{folder}')
torch.ops.load_library('{folder}/octet_operators.so')
import octet_pybind
print(octet_pybind.add2(torch.ones(2), torch.ones(2)).tolist())
"""
    used = ended(start_python(code, examples.root, examples.environment()))
    assert (used.returncode, used.stdout) == (0, "[2.0, 2.0]\n"), used.stderr


@pytest.mark.parametrize(
    "edit, option, message",
    [
        ("queue", "", "queue is a module of Python's standard library; choose another name"),
        ("octet_pybind", "-DPython_INCLUDE_DIR=/nonexistent", "apt install python3-dev"),
    ],
)
def test_trap_of_a_python_module(examples, tmp_path, edit, option, message):
    examples.edit("CMakeLists.txt", "octet_pybind python_module", f"{edit} python_module")
    options = [PREFIX, PYTHON, "-DOCTET_PYTHON_MODULE=ON", *filter(None, [option])]
    done = examples.call("cmake", "-S", examples.folder, "-B", tmp_path / "b", *options)
    assert done.returncode == 1 and message in words(done.stdout)


def test_trap_the_wrong_python(examples, tmp_path):
    """CMake takes the first Python that it likes, which may not be the one that has torch."""
    prefix = tmp_path / "lib/python3.99/site-packages/torch"
    prefix.parent.mkdir(parents=True)
    prefix.symlink_to(Path(torch.__file__).parent)
    options = f"-DCMAKE_PREFIX_PATH={prefix}/share/cmake", PYTHON, "-DOCTET_PYTHON_MODULE=ON"
    done = examples.call("cmake", "-S", examples.folder, "-B", tmp_path / "b", *options)
    assert done.returncode == 1
    assert "this torch is for Python 3.99, and CMake took" in words(done.stdout)


def test_flags_are_written_out_as_the_loader_has_them():
    """CMakeLists.txt repeats jit/machine/toolchain.py's flags; equal bits depend on it."""
    from loader.jit.machine import toolchain

    text = (ROOT / "examples/three_ways/CMakeLists.txt").read_text()
    assert f"$<$<COMPILE_LANGUAGE:CXX>:{';'.join(toolchain.CFLAGS)}>" in text
    kept = [flag for flag in toolchain.CUDA_FLAGS if not flag.startswith("-U")]
    assert (
        f"$<$<COMPILE_LANGUAGE:CUDA>:{';'.join(kept).replace('-Xcompiler;', '-Xcompiler=')}" in text
    )
    spec = importlib.util.spec_from_file_location("ways", ROOT / "examples/three_ways/ways.py")
    ways = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ways)
    names = {unit.name for unit in loader._session.units.values()}
    assert {*ways.OPERATORS} <= names and "foreach(operator add2 trilinear_interpolation)" in text
