"""Old extensions built, loaded and called: mended where that is needed, and never without a word."""

import json
import shutil
import warnings

import pytest
import torch

import loader
from loader.jit.extension import objects

TENSORS = """
#include <torch/extension.h>
#define CHECK_CPU(x) AT_CHECK(!x.type().is_cuda(), #x " must be on the CPU")
at::Tensor twice_old(at::Tensor x) {
    CHECK_CPU(x);
    auto y = at::empty_like(x);
    AT_DISPATCH_FLOATING_TYPES(x.type(), "twice_old", ([&] {
        const scalar_t* from = x.data_ptr<scalar_t>();
        scalar_t* to = y.data_ptr<scalar_t>();
        for (int64_t i = 0; i < x.numel(); ++i) to[i] = 2 * from[i];
    }));
    return y;
}
"""
STRICT = """
int thrice(int x) {
    int never_used = 0;
    return 3 * x;
}
"""
KERNEL = """
__global__ void sums(float* x) {
    float v = x[threadIdx.x];
    for (int step = 16; step > 0; step /= 2) v += __shfl_down(v, step);
    if (__any(v > 0)) x[threadIdx.x] = v;
}
void run(size_t x) {
    sums<<<1, 32>>>((float*)x);
    cudaThreadSynchronize();
}
"""


def strict():
    """Build what compiles only if warnings are no errors."""
    return loader.load_inline(
        "thrice", STRICT, functions=["thrice"], extra_cflags=["-Wall", "-Werror"]
    )


@pytest.fixture(autouse=True)
def without_pending(monkeypatch):
    monkeypatch.delenv("LOADER_MENDS", raising=False)


def test_an_old_extension_of_tensors_gives_what_its_reference_does(monkeypatch):
    """Built with three changes, of which one line tells, at the lines of this file."""
    with pytest.warns(loader.MendWarning) as told:
        old = loader.load_inline("twice_old", TENSORS, functions=["twice_old"])
    x = torch.rand(17, dtype=torch.float64)
    assert torch.equal(old.twice_old(x), 2 * x)
    (warning,) = [w for w in told if w.category is loader.MendWarning]
    assert warning.filename == __file__
    text = str(warning.message)
    assert "\n" not in text
    assert "`AT_CHECK` -> `TORCH_CHECK`" in text and "`x.scalar_type()`" in text
    assert {row["line"] for row in old.__mends__} == {3, 7}
    monkeypatch.setenv("LOADER_MENDS", "diff")
    with pytest.warns(loader.MendWarning, match="@@ cpp_sources.cpp:3\n-#define"):
        assert loader.load_inline("twice_old", TENSORS, functions=["twice_old"]) is old


def test_it_is_told_each_time_and_can_be_forbidden(monkeypatch):
    """A build from the cache is no less mended; filters know the warning by its class."""
    with pytest.warns(loader.MendWarning, match="-Werror"):
        assert strict().thrice(2) == 6
    with pytest.warns(loader.MendWarning, match="-Werror"):
        strict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", loader.MendWarning)
        strict()
    monkeypatch.setenv("LOADER_MENDS", "off")
    with pytest.raises(loader.BuildError, match="unused variable ‘never_used’") as failed:
        strict()
    assert failed.value.as_dict()["mends"] == []
    monkeypatch.setenv("LOADER_MENDS", "sometimes")
    with pytest.raises(ValueError, match="LOADER_MENDS must be one of on, diff, off"):
        strict()


def test_what_is_left_after_mends_is_told_with_them():
    """The errors that no mend answers, and the mends that were made on the way."""
    text = STRICT.replace("return 3 * x", "return 3 * missing")
    with pytest.raises(
        loader.BuildError, match=r"missing.*\n(?s:.*)left after mends.*-Werror"
    ) as failed:
        loader.load_inline(
            "thrice_bad", text, functions=["thrice"], extra_cflags=["-Wall", "-Werror"]
        )
    (row,) = failed.value.as_dict()["mends"]
    assert row["after"].endswith("-Wno-error=unused-variable")
    assert json.dumps(row)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_old_cuda_is_compiled_for_new_gpus(monkeypatch, tmp_path):
    """Functions of warps and of the runtime that are gone, and a GPU that nvcc does not know."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "6.0 9.0")
    sources = {
        "a.cpp": "#include <Python.h>\nvoid run(size_t x);\n"
        "static PyObject* call(PyObject*, PyObject*) { run(0); Py_RETURN_NONE; }\n"
        'static PyMethodDef methods[] = {{"run", call, METH_NOARGS, ""}, {}};\n'
        'static PyModuleDef module = {PyModuleDef_HEAD_INIT, "old_cuda", "", -1, methods};\n'
        "PyMODINIT_FUNC PyInit_old_cuda() { return PyModule_Create(&module); }\n",
        "b.cu": KERNEL,
    }
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    with pytest.warns(loader.MendWarning):
        old = loader.load("old_cuda", [tmp_path / name for name in sources])
    mends = {row["mend"] for row in old.__mends__}
    assert {"`__shfl_down(...)`", "`cudaThreadSynchronize`"} <= mends
    assert any("-gencode" in mend for mend in mends)
    assert {name: (tmp_path / name).read_text() for name in sources} == sources


OLD_CUDA = """
#include <torch/extension.h>
#include <THC/THC.h>
extern THCState *state;
#define CHECK_CUDA(x) AT_CHECK(x.type().is_cuda(), #x " must be on the GPU")
template <typename scalar_t>
__global__ void scale_kernel(
    const torch::PackedTensorAccessor<scalar_t, 2, torch::RestrictPtrTraits, size_t> x,
    torch::PackedTensorAccessor<scalar_t, 2, torch::RestrictPtrTraits, size_t> y) {
    const int i = blockIdx.x, j = threadIdx.x;
    if (j < x.size(1)) y[i][j] = 2 * x[i][j];
}
at::Tensor scale_old(at::Tensor x) {
    CHECK_CUDA(x);
    auto y = at::zeros_like(x);
    AT_DISPATCH_FLOATING_TYPES(x.type(), "scale_old", ([&] {
        scale_kernel<scalar_t><<<x.size(0), 32 * THCCeilDiv(x.size(1), (int64_t)32), 0,
                                 THCState_getCurrentStream(state)>>>(
            x.packed_accessor<scalar_t, 2, torch::RestrictPtrTraits, size_t>(),
            y.packed_accessor<scalar_t, 2, torch::RestrictPtrTraits, size_t>());
    }));
    THCudaCheck(cudaGetLastError());
    return y;
}
"""


@pytest.mark.cuda
def test_an_old_cuda_extension_gives_what_its_reference_does():
    """With all that the tutorials of torch 1.0 used."""
    with pytest.warns(loader.MendWarning, match="THC/THC.h"):
        old = loader.load_inline(
            "scale_old", "at::Tensor scale_old(at::Tensor x);", OLD_CUDA, functions=["scale_old"]
        )
    x = torch.rand(5, 37, device="cuda", dtype=torch.float64)
    assert torch.equal(old.scale_old(x), 2 * x)
    with pytest.raises(RuntimeError, match="x must be on the GPU"):
        old.scale_old(x.cpu())


def test_objects_of_a_setup_are_mended_too(tmp_path, capfd):
    """Text and flags, beside a header of the source's, in a file that stays as it is."""
    text = (
        '#include "own.h"\nint cudaDeviceSynchronize();\n'
        "int f() { int never_used = 0; return cudaThreadSynchronize() + OWN; }\n"
    )
    source, made = tmp_path / "a b.cpp", tmp_path / "build/a.o"
    (tmp_path / "own.h").write_text("#define OWN 1\n")
    source.write_text(text)
    before = ["-Wall", "-Werror", '-DX="a \'b"']
    command = objects.Command([shutil.which("c++")], before, str(source), ["-std=c++17"])
    order = objects.Order("old", {str(made): command})
    for _ in range(2):  # the second time from the cache
        with pytest.warns(
            loader.MendWarning, match=r"cudaDeviceSynchronize` \(a b.cpp:3\); .*-Werror"
        ):
            objects.make(order)
        assert made.stat().st_size
        made.unlink()
    assert source.read_text() == text
    source.write_text(text.replace("OWN;", "missing;"))
    with pytest.raises(loader.BuildError, match="left after mends") as failed:
        objects.make(order)
    (message,) = failed.value.as_dict()["messages"]
    assert (message["file"], message["line"]) == (str(source), 3)
