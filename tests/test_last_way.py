"""The last way in which an extension is compiled is that of torch.utils.cpp_extension."""

import copy
import inspect
import re
import shlex

import pytest
from conftest import Captured

from loader.jit.build.workshop import CompileError
from loader.jit.extension import arguments, load
from loader.jit.extension.recipe import ExtensionRecipe

DECLARES = {"cpp_sources": ["int f();", "int g();"], "extra_include_paths": ["/a b"]}
LAST_WAYS = {
    "strings": DECLARES,
    "functions": {**DECLARES, "functions": {"f": "doc", "g": "g"}},
    "no wrapping": {**DECLARES, "functions": ["f"], "with_pytorch_error_handling": False},
    "own headers": {"cpp_sources": "#include <vector>\n", "no_implicit_headers": True},
    "cuda": {**DECLARES, "cuda_sources": ["int h();"], "extra_cuda_cflags": ["-DA=1", "-O2"]},
    "cuda alone": {"cpp_sources": "", "cuda_sources": "int h();", "extra_cuda_cflags": ["-std=c++20"]},
    "cuda without headers": {
        "cpp_sources": "", "cuda_sources": "int h();", "no_implicit_headers": True
    },
}  # fmt: skip


def last_way(extension, tools, tmp_path):
    """What would be compiled: each text without #line, and the compiler's arguments."""
    shop = Captured(tmp_path / "ours" / "m")
    shop.folder.mkdir(parents=True)
    with pytest.raises(CompileError):
        ExtensionRecipe(extension, tools, narrow=False).make(shop, {})
    jobs = {job.file.endswith(".cu"): job for job in shop.jobs}
    texts = {cuda: (shop.folder / job.file).read_text() for cuda, job in jobs.items()}
    words = {cuda: [*job.command[1:]] for cuda, job in jobs.items()}
    return {cuda: re.sub("(?m)^#line .*\n", "", text) for cuda, text in texts.items()}, words


@pytest.fixture
def torchs(monkeypatch, tmp_path):
    """What torch would give its compilers, of a call; and the toolchain."""
    from torch.utils import cpp_extension

    import loader
    from loader.jit.machine import toolchain

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    tools = toolchain.current.__wrapped__(loader._session.caches[-1])
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", tools.cuda_home)
    monkeypatch.setattr(cpp_extension, "_run_ninja_build", lambda *_, **__: None)
    facts: dict = {}
    monkeypatch.setattr(cpp_extension, "_write_ninja_file", lambda **given: facts.update(given))
    (tmp_path / "theirs").mkdir()

    def asked(call, **arguments):
        with pytest.raises((ImportError, OSError)):  # nothing was built
            getattr(cpp_extension, call)(build_directory=str(tmp_path / "theirs"), **arguments)
        flags = {False: facts["cflags"], True: facts["cuda_cflags"]}
        return {
            cuda: [w for f in given or [] for w in shlex.split(f)] for cuda, given in flags.items()
        }

    return asked, tools


@pytest.mark.parametrize("case", LAST_WAYS)
def test_the_last_way_is_torchs_own(case, tmp_path, torchs):
    """The same commands and the same texts as torch.utils.cpp_extension gives its compilers."""
    asked, tools = torchs
    given = {"name": f"own_{case.replace(' ', '_')}", "extra_cflags": ["-DA=1", "-O2"]} | LAST_WAYS[
        case
    ]
    if "cuda_sources" in given and not tools.nvcc:
        pytest.skip("no nvcc")
    words = asked("load_inline", **copy.deepcopy(given))  # it adds to the caller's lists
    bound = inspect.signature(load.load_inline).bind(**given)
    bound.apply_defaults()
    ours, commands = last_way(arguments.of_strings(dict(bound.arguments)), tools, tmp_path)
    assert ours.keys() == ({False, True} if "cuda_sources" in given else {False})
    for cuda, text in ours.items():
        theirs = (tmp_path / "theirs" / ("cuda.cu" if cuda else "main.cpp")).read_text()
        assert text.split() == theirs.split()
        assert commands[cuda] == words[cuda]


def test_the_last_way_of_files_is_torchs_own(tmp_path, torchs):
    """But for the folder of their own headers, since a copy is compiled."""
    asked, tools = torchs
    names = {
        "a.cpp": "#include <torch/extension.h>\nint f();\n",
        "b.cu": "#include <ATen/ATen.h>\n",
    }
    names = names if tools.nvcc else {"a.cpp": names["a.cpp"]}
    for name, text in names.items():
        (tmp_path / name).write_text(text)
    given = {"name": "own_files", "sources": [str(tmp_path / name) for name in names]}
    given |= {"extra_cflags": ["-DA=1"], "extra_cuda_cflags": ["-lineinfo"]}
    words = asked("load", **given)
    bound = inspect.signature(load.load).bind(**given)
    bound.apply_defaults()
    ours, commands = last_way(arguments.of_files(dict(bound.arguments)), tools, tmp_path)
    for name, text in names.items():
        cuda = name.endswith(".cu")
        assert ours[cuda].strip() == text.strip()
        beside = ["-Xcompiler", f"-iquote,{tmp_path}"] if cuda else ["-iquote", str(tmp_path)]
        first = 2 if words[cuda][0] == "-ccbin" else 0
        assert commands[cuda] == [*words[cuda][:first], *beside, *words[cuda][first:]]
