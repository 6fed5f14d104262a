"""What is said of a failed build, by the real compilers and linkers wherever they can be had."""

import os
import random
import re
import shutil
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from loader.jit.errors.diagnose import explain_failure
from loader.jit.machine.sources import discover

COMPILERS = {
    "g++": ("a.cpp", ["g++", "-std=c++17", "-fPIC", "-c", "-o", "/dev/null"]),
    "clang++": ("a.cpp", ["clang++", "-std=c++17", "-fPIC", "-c", "-o", "/dev/null"]),
    "nvcc": ("a.cu", ["nvcc", "-std=c++17", "-arch=sm_90", "-cubin", "-o", "/dev/null"]),
}
LINKERS = ("bfd", "gold", "lld")
HEADER = """#pragma once
template <typename T> struct Box { T v; auto get() { return v.missing(); } };
template <typename T> auto read(T x) { return Box<T>{x}.get(); }
template <typename T> void packed() {
    static_assert(sizeof(T) == 3, "a pixel must have three bytes, as the file has");
}
#define TWICE(x) ((x) + (x).nope)
"""


def run(command, folder, **options) -> str:
    """All that a command prints."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
        **options,
    )
    return done.stdout


@pytest.fixture(params=COMPILERS)
def explained(request, tmp_path):
    """Compile a source by each compiler in turn; what it printed, explained, in lines."""
    name, command = COMPILERS[request.param]
    if shutil.which(request.param) is None:
        pytest.skip(f"no {request.param} on PATH")
    (tmp_path / "include").mkdir()
    (tmp_path / "include/lib.h").write_text(HEADER)
    file = tmp_path / name

    def explain(source, most=3):
        file.write_text(source)
        output = run([*command, f"-I{tmp_path}/include", file], tmp_path)
        return explain_failure(f"[1/2] c++ -c {file}\nFAILED: a.o\n{output}", tmp_path, (), most)

    explain.file, explain.by = str(file), request.param
    return explain


def marked(lines: list[str]) -> str:
    """The source from where the compiler marks it."""
    return lines[1][re.search(r"[~^]", lines[2]).start() :]


def test_an_error_has_its_place_its_source_line_and_a_caret(explained):
    lines = explained("int zero = 0;\nint f() {\treturn undeclared; }\n").splitlines()
    assert re.match(re.escape(explained.file) + r":2:\d+: error: .*undeclared", lines[0])
    assert lines[1] == "    2 | int f() {       return undeclared; }"
    assert marked(lines).startswith("undeclared;") and len(lines) == 3


@pytest.mark.parametrize(
    "source, at",
    [
        ("void over(int), over(int, int);\nstruct P {};\nvoid f() { over(P{}); }", "over("),
        ("int f() { int unused = 1; return 1; }\n\nint g() { return nowhere(); }", "nowhere"),
        ('\n\nint f() { return "text"; }', '"text"'),
    ],
)
def test_warnings_and_candidates_are_left_out(explained, source, at):
    text = explained(f'#pragma GCC diagnostic warning "-Wall"\n{source}\n')
    assert text.startswith(f"{explained.file}:4:") and at in marked(text.splitlines())
    assert not re.search("candidate|note|warning|unused", text.replace(explained.file, ""))
    assert len(text.splitlines()) <= 5


def test_a_note_or_a_word_that_has_the_cure_is_kept(explained):
    text = explained("struct P { int alpha; };\nint f(P p) { return p.alpa; }\n")
    assert ("did you mean" in text) == (explained.by != "nvcc") and ":2:" in text
    if explained.by == "g++":
        text = explained("std::string s;")
        assert "‘std::string’ is defined in header ‘<string>’" in text


@pytest.mark.parametrize(
    "line, at, text",
    [
        ("int f() { return read(3); }", "read(3)", "missing|member reference|class type"),
        ("void f() { std::vector<P> v; std::sort(v.begin(), v.end()); }", "sort", "<|binary"),
        ("void f() { std::map<P, int> m; m.insert({P{}, 1}); }", "insert", "<|binary"),
    ],
)
def test_an_error_in_a_header_begins_with_the_users_line(explained, line, at, text):
    head = (
        '#include "lib.h"\n#include <algorithm>\n#include <map>\n#include <vector>\nstruct P {};\n'
    )
    lines = explained(head + line + "\n").splitlines()
    assert lines[0].startswith(f"{explained.file}:6:")
    assert lines[0].endswith(": error in a template that this line instantiates:")
    assert lines[1] == f"    6 | {line}"
    # g++ 12 marks a call at its parenthesis.
    assert at in marked(lines) or lines[1][: lines[2].index("^")].endswith((at, at[:-3], "v.end()"))
    assert re.search(rf"\.h:\d+:\d+: error: .*({text})", lines[3]), lines[3]
    assert "^" in lines[5]
    assert re.fullmatch(r"\(\d+ lines? of template context in the log\)", lines[6])
    assert all(len(shown) < 450 for shown in lines)


def test_the_line_of_use_is_found_in_newer_compilers_words_too():
    """g++ 14 quotes the lines on the way, and nvcc may leave some out."""
    use = "int h() { return mid(3); }"
    for text in (
        "x.h: In instantiation of ‘auto mid(T) [with T = int]’:\n"
        f"a.cpp:8:21:   required from here\n    8 | {use}\n      |                 ~~~^~~\n"
        "x.h:5:63: error: no\n    5 | v.no();\n      |   ^~\n",
        "x.h(5): error: no\n  v.no();\n    ^\n          detected during:\n"
        '            [ 2 instantiation contexts not shown ]\n            instantiation of "auto '
        'mid(T) [with T=int]" at line 8 of "a.cpp"\n',
    ):
        lines = explain_failure(text, "/nowhere").splitlines()
        assert re.match(r"a\.cpp:8:\d+: error in a template that this line inst", lines[0]), lines
        assert lines[1].startswith("x.h:5:") and lines[2] == "    5 | v.no();", lines
        assert re.fullmatch(r"\(\d lines? of template context in the log\)", lines[-1])


def test_a_failed_static_assert_comes_first_and_whole(explained):
    source = '#include "lib.h"\nint f() { return undeclared; }\nvoid g() { packed<int>(); }\n'
    lines = explained(source).splitlines()
    assert lines[0].startswith(f"{explained.file}:3:") and lines[1].endswith("packed<int>(); }")
    assert "a pixel must have three bytes, as the file has" in lines[3]
    assert any(line.startswith(f"{explained.file}:2:") for line in lines)


def test_an_error_in_a_macro_shows_the_line_of_its_use(explained):
    source = '#include "lib.h"\nint f() { int a = 1;\treturn 1 + TWICE(a); }\n'
    lines = explained(source).splitlines()
    assert lines[0].startswith(f"{explained.file}:2:") and marked(lines).startswith("TWICE(a)")
    # In its argument, too: there it is at the user's line anyhow.
    lines = explained('#include "lib.h"\nint f() { return TWICE(undeclared); }\n').splitlines()
    assert lines[0].startswith(f"{explained.file}:2:") and "undeclared" in lines[0]


def test_many_errors_are_counted(explained):
    text = explained("".join(f"int f{i}() {{ return oops{i}; }}\n" for i in range(7)), most=2)
    assert text.splitlines()[-1] == "(2 of 7 errors; the others are in the log)"
    assert text.count(" error: ") == 2


def test_an_error_that_is_repeated_is_shown_once():
    text = 'a.cu(7): error: identifier "x" is undefined\n    x();\n    ^\n\n'
    shown = explain_failure(text * 3, "/nowhere")
    assert shown == 'a.cu:7:3: error: identifier "x" is undefined\n    7 |   x();\n      |   ^'


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
@pytest.mark.parametrize(
    "source, expected",
    [
        ('#include "none.h"\n', r"a.cu:1:10: fatal error: none.h: No such file"),
        (
            "__global__ void k(int* x) { __shared__ double s[20000]; s[*x] = 1; x[0] = s[x[1]]; }",
            r"ptxas error .* 'k\(int\*\)' uses too much shared data .*\n.*extern __shared__",
        ),
        (
            '__global__ void k(int* x) { asm("frob.u32 %0, 1;" : "=r"(*x)); }',
            r"ptxas .*'frob'$",
        ),
        (
            "__device__ int away(int);\n__global__ void k(int* x) { x[0] = away(1); }",
            r"undefined symbol: away\(int\)\n  used in .*a.cu:2\n  none of the operator's files",
        ),
    ],
)
def test_what_nvccs_other_programs_say(tmp_path, source, expected):
    file = tmp_path / "a.cu"
    file.write_text(source)
    output = run([*COMPILERS["nvcc"][1], file], tmp_path)
    assert re.match(
        expected.replace("a.cu:1", f"{file}:1"), explain_failure(output, tmp_path, ["a.cu"])
    )


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a.cpp:3: error: old", "a.cpp:3: error: old"),
        ("a.cu(3): error #20-D: text", "a.cu:3: error: text"),
        (
            'a.cu(3): catastrophic error: cannot open source file "x.h"',
            "a.cu:3: fatal error: cannot",
        ),
        ("a dir (1)/a.cu(3): error: text", "a dir (1)/a.cu:3: error: text"),
        ("cc1plus: error: unknown option", "cc1plus: error: unknown option"),
        ("nvcc fatal   : Unknown option '--x'", "nvcc fatal   : Unknown option '--x'"),
        (
            "a.cpp:1:2: internal compiler error: in f, at g.cc:7\nPlease submit",
            "a.cpp:1:2: internal",
        ),
        (
            "\x1b[01m\x1b[Ka.cpp:3:1:\x1b[m\x1b[K \x1b[01;31m\x1b[Kerror: \x1b[mred",
            "a.cpp:3:1: error: red",
        ),
    ],
)
def test_other_wordings(text, expected):
    assert explain_failure(text, "/nowhere").startswith(expected)


def test_long_types_are_shortened():
    string = "std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >"
    text = f"a.cpp:1:1: error: no ‘f(std::vector<{string}, std::allocator<{string} > >)’"
    assert "no ‘f(std::vector<std::string>)’" in explain_failure(text, "/nowhere")
    deep = "A<" * 90 + ">" * 90
    text = f"a.cpp:1:1: error: no ‘f({deep})’ [with T = {deep}; U = int[3]]; did you mean ‘g’?"
    assert explain_failure(text, "/nowhere") == (
        "a.cpp:1:1: error: no ‘f(A<A<A<…>>>)’ [with …]; did you mean ‘g’?"
    )


SOURCES = ("ops/op.cpp", "kernels/op_cpu.cpp")


@pytest.fixture
def checkout(tmp_path):
    """A checkout in which op_cpu is declared and used, in a file of its own nothing yet."""
    for folder in ("include", "ops", "kernels"):
        (tmp_path / folder).mkdir()
    (tmp_path / "include/op.h").write_text(
        "#pragma once\nnamespace n { struct P {}; }\n"
        'extern "C" __attribute__((visibility("hidden"))) void op_backward_cpu(const n::P* p);\n'
    )
    (tmp_path / "ops/op.cpp").write_text(
        '#include "op.h"\n\n// op_backward_cpu is called here:\n'
        "void op(n::P* p) { op_backward_cpu(p); }\n"
    )
    return tmp_path


def linked(checkout, linker, flags=("-Wl,--no-undefined",)) -> str:
    if shutil.which(f"ld.{linker}") is None:
        pytest.skip(f"no ld.{linker} on PATH")
    command = ["g++", "-shared", "-fPIC", f"-fuse-ld={linker}", "-Iinclude"]
    sources = [source for source in SOURCES if (checkout / source).exists()]
    output = run([*command, *sources, *flags, "-o", "op.so"], checkout)
    return explain_failure(output, checkout, SOURCES)


@pytest.mark.parametrize("linker", LINKERS)
@pytest.mark.parametrize(
    "kernel, fault",
    [
        (None, "should be defined in {}, which does not exist"),
        ("int unrelated;", "should be defined in {}, which does not define it"),
        (
            "namespace n { struct P; }\n\nvoid op_backward_cpu(const n::P* p) {\n}\n",
            "{}:3 defines that name, but with other arguments or another linkage: include there",
        ),
    ],
)
def test_a_missing_launcher_is_named_with_the_file_that_should_have_it(
    checkout, linker, kernel, fault
):
    file = checkout / "kernels/op_cpu.cpp"
    if kernel:
        file.write_text(kernel)
    lines = linked(checkout, linker).splitlines()
    assert lines[:3] == [
        "undefined symbol: op_backward_cpu",
        f"  used in {checkout}/ops/op.cpp:4",
        f"  declared in {checkout}/include/op.h:3",
    ]
    assert lines[3].startswith("  " + fault.format(file)) and len(lines) == 4


@pytest.mark.parametrize(
    "unit, name",
    [
        ("hash_grid_encoding", "hash_grid_points_cuda"),
        ("hash_grid_encoding", "hash_grid_table_cuda"),
        ("grid_sample", "grid_sample_planes_cpu"),
        ("apply_lut3d", "apply_lut3d_backward_cuda"),
        ("square", "square_backward_cpu"),
    ],
)
def test_a_launcher_that_lost_its_definition_is_sent_to_the_file_that_had_it(tmp_path, unit, name):
    """Operators' launchers are not named after their files alone."""
    for folder in ("include", "kernels", "ops"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    sources = discover(tmp_path)[unit].sources
    defines = re.compile(rf"^\w[\w *]*\b{name}\(", re.MULTILINE)
    (had,) = [s for s in sources if defines.search((tmp_path / s).read_text())]
    text = (tmp_path / had).read_text()
    (tmp_path / had).write_text(defines.sub(f"void other_{name}(", text))
    told = explain_failure(f"x.so: undefined symbol: {name}", tmp_path, sources)
    assert f"should be defined in {tmp_path / had}, which does not define it" in told


@pytest.mark.parametrize("linker", LINKERS)
def test_a_function_of_another_operator_is_found_there(checkout, linker):
    (checkout / "ops/op.cpp").write_text("int other(double);\nint op() { return other(1); }\n")
    (checkout / "kernels/b_cpu.cpp").write_text("int other(double x) { return x; }\n")
    text = linked(checkout, linker)
    assert text.startswith(f"undefined symbol: other(double)\n  used in {checkout}/ops/op.cpp:2\n")
    assert f"  {checkout}/kernels/b_cpu.cpp:1 defines that name, but is not compiled" in text


@pytest.mark.parametrize("linker", LINKERS)
def test_a_function_defined_twice_is_shown_in_both_places(checkout, linker):
    for source in SOURCES:
        (checkout / source).write_text("\nint twice(int x) { return x; }\n")
    assert linked(checkout, linker).splitlines()[:2] == [
        "defined twice: twice(int)",
        f"  in {checkout}/ops/op.cpp:2 and in {checkout}/kernels/op_cpu.cpp:2",
    ]


@pytest.mark.parametrize("linker", LINKERS)
def test_a_missing_library_and_an_object_without_pic_get_their_cure(checkout, linker):
    (checkout / "ops/op.cpp").write_text("extern int a; int b[9]; int f() { return a + b[a]; }\n")
    missing = linked(checkout, linker, ["-lnotthere"])
    assert missing.startswith("the linker does not find libnotthere.so: install the package")
    assert "compile it again with -fPIC" in linked(checkout, linker, ["-fno-pic"])


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a.o: undefined reference to `f(at::Tensor)'",
         "undefined symbol: f(at::Tensor)\n  a.o: undefined reference to `f(at::Tensor)'\n  none of the"),
        ("/usr/bin/ld: a.o: relocation R_X86_64_PC32 against undefined hidden symbol `f_cuda' can not "
         "be used when making a shared object", "undefined symbol: f_cuda"),
        ("mold: error: undefined symbol: f(int)\n>>> referenced by a.cpp", "undefined symbol: f(int)"),
        ("nvlink error   : Undefined reference to '_Z1fi' in 'a.o'",
         "undefined symbol: f(int)\n  nvlink error   : Undefined reference to '_Z1fi' in 'a.o'\n"),
        ("a.o: In function `g()':\na.cpp:(.text+0x5): undefined reference to `f(int)'",
         "undefined symbol: f(int)\n  a.cpp:(.text+0x5): undefined reference to `f(int)'\n"),
        ("a.o:a.cpp:function g(): error: undefined reference to 'vtable for P'",
         "undefined symbol: vtable for P\n  a.o:a.cpp:function g(): error: undefined reference to 'vtable for P'\n  a virtual member function"),
        ("ld.lld: error: undefined symbol: cudaLaunchKernel\n>>> referenced by a.cpp",
         "undefined symbol: cudaLaunchKernel\n  ld.lld: error: undefined symbol: cudaLaunchKernel\n  >>> referenced by a.cpp\n  the CUDA runtime's: link with -lcudart"),
        ("ImportError: /x/a.so: undefined symbol: _ZNK2at6Tensor4dataEv",
         "undefined symbol: at::Tensor::data() const\n  ImportError: /x/a.so: undefined symbol: _ZNK2at6Tensor4dataEv\n  PyTorch's: compile"),
        ("b.cpp:(.text+0x0): multiple definition of `f()'; a.o:a.cpp:(.text+0x0): first defined here",
         "defined twice: f()\n  b.cpp:(.text+0x0): multiple definition of `f()'; a.o:a.cpp:(.text"),
        ("/usr/bin/ld.gold: error: b.o: multiple definition of 'f()'\n"
         "/usr/bin/ld.gold: a.o: previous definition here",
         "defined twice: f()\n  /usr/bin/ld.gold: error: b.o: multiple definition of 'f()'\n"
         "  /usr/bin/ld.gold: a.o: previous definition here\n  keep one of them"),
        ("ld.lld: error: duplicate symbol: f()\n>>> defined at a.cpp\n>>>       a.o:(f())\n"
         ">>> defined at b.cpp", "defined twice: f()\n  ld.lld: error: duplicate symbol: f()\n"
         "  >>> defined at a.cpp\n  >>>       a.o:(f())\n  >>> defined at b.cpp\n  keep one"),
        ("nvlink error   : Multiple definition of '_Z1fv' in 'b.o', first defined in 'a.o'",
         "defined twice: f()\n  nvlink error   : Multiple definition of '_Z1fv' in 'b.o', first def"),
    ],
)  # fmt: skip
def test_what_linkers_say_is_told_without_a_checkout_too(text, expected):
    text = f"[2/2] c++ a.o\n{text}\ncollect2: error: ld returned 1 exit status"
    assert explain_failure(text, "/nowhere").startswith(expected)


def loaded(path, folder) -> str:
    return run([sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(path)!r})"], folder)


def test_a_library_with_an_undefined_symbol_names_the_file_that_uses_it(checkout):
    (checkout / "ops/op.cpp").write_text(
        '#include "op.h"\nint away(n::P*, double);\nint op(n::P* p) { return away(p, 1); }\n'
    )
    run(["g++", "-shared", "-fPIC", "-Iinclude", "ops/op.cpp", "-o", "op.so"], checkout)
    output = loaded(checkout / "op.so", checkout)
    assert explain_failure(output, checkout, SOURCES) == (
        f"undefined symbol: away(n::P*, double)\n  used in {checkout}/ops/op.cpp:3\n"
        "  none of the operator's files defines it: write it, or link the library that has it"
    )


@pytest.mark.parametrize(
    "content, expected",
    [
        (None, "none.so.3 is not found when the library is loaded: install the package"),
        (b"x", "{} is no shared library for this machine"),
        (b"INPUT(libc.so)" * 99, "{} is no shared library for this machine"),
        (b"\x7fELF\x01\x01\x01" + bytes(9999), "{} is no shared library for this machine"),
    ],
)
def test_a_library_that_cannot_be_loaded_gets_its_cure(tmp_path, content, expected):
    library = tmp_path / "a.so"
    if content:
        library.write_bytes(content)
    output = loaded(library if content else "none.so.3", tmp_path)
    assert explain_failure(output.splitlines()[-1], tmp_path).startswith(expected.format(library))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("OSError: /lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by /x/a.so)",
         "GLIBCXX_3.4.32 is missing: the library was built by a newer g++"),
        ("OSError: /lib/libc.so.6: version `GLIBC_2.38' not found (required by /x/a.so)",
         "GLIBC_2.38 is missing: the library was built on a newer system"),
        ("OSError: /x/libgomp.so: cannot allocate memory in static TLS block", "no room is left"),
        ("OSError: /x/a.so: failed to map segment from shared object", "the system refuses"),
        ("ImportError: dynamic module does not define module export function (PyInit_a)",
         "the library has no Python module in it"),
    ],
)  # fmt: skip
def test_other_words_of_dlopen(text, expected):
    assert explain_failure(text, "/nowhere").startswith(expected)


KILLED = "the compiler was killed, most likely for lack of memory; set MAX_JOBS=1"
FULL = "free some space, or set LOADER_CACHE_DIR"


@pytest.mark.parametrize(
    "line, expected",
    [
        ("g++: fatal error: Killed signal terminated program cc1plus", KILLED),
        ("c++: internal compiler error: Killed (program cc1plus)", KILLED),
        ("virtual memory exhausted: Cannot allocate memory", KILLED),
        ("cc1plus: out of memory allocating 65536 bytes after a total of 7 bytes", KILLED),
        ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", KILLED),
        ("clang: error: unable to execute command: Killed", KILLED),
        ("collect2: fatal error: ld terminated with signal 9 [Killed]", KILLED),
        ("/bin/sh: line 1:  4711 Killed                  c++ -c a.cpp", KILLED),
        ("a.cpp:9:1: fatal error: error writing to /tmp/a.s: No space left on device", FULL),
        ("/usr/bin/ld: final link failed: No space left on device", FULL),
        ("OSError: [Errno 122] Disk quota exceeded: 'build.ninja'", FULL),
        ("/x/crt/host_config.h:137:2: error: #error -- unsupported GNU version! gcc versions later "
         "than 15 are not supported!", "takes g++ up to version 15: install g++-15 and name it in CC"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_130'", "TORCH_CUDA_ARCH_LIST"),
        ("ValueError: Unknown CUDA arch (13.0) or GPU not supported", "13.0 is unknown to this nvcc or"),
        ("sh: 1: cicc: not found", "cicc is missing: install the whole CUDA toolkit"),
        ("/bin/sh: 1: /usr/bin/nvcc: not found", "nvcc is missing: install the whole CUDA toolkit"),
        ("bash: line 1: ccache: command not found", "the program ccache is missing"),
        ("a.cpp:1:10: fatal error: cuda_runtime.h: No such file or directory",
         "the header cuda_runtime.h of CUDA is missing"),
        ("a.cpp:1:10: fatal error: 'cuda_fp16.h' file not found", "the header cuda_fp16.h of CUDA"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_machine_is_all_that_is_said(line, expected):
    output = (
        f"[1/2] c++ -c a.cpp\nFAILED: a.o\na.cpp:1:1: error: other\n{line}\nninja: build stopped"
    )
    cure, quoted = explain_failure(output, "/nowhere").splitlines()
    assert expected in cure and quoted == line


def test_an_error_that_only_speaks_of_memory_is_none_of_the_machines():
    for text in ("a.cpp:1:1: error: no 'f': out of memory", "a.cpp:2:1: error: Killed signal"):
        assert explain_failure(text, "/nowhere") == text
    text = "a.cpp:1:10: fatal error: cuda_mine.h: No such file or directory"
    assert explain_failure(text, "/nowhere") == text


def test_the_machines_faults_made_for_real(tmp_path):
    source = tmp_path / "a.cpp"
    source.write_text("#include <map>\n")
    starved = run(["sh", "-c", f"ulimit -v 60000; g++ -c {source} -o /dev/null"], tmp_path)
    assert KILLED in explain_failure(starved, tmp_path)
    assert FULL in explain_failure(
        run(["g++", "-c", source, "-o", "/dev/full"], tmp_path), tmp_path
    )


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_nvccs_own_demands_made_for_real(tmp_path):
    source = tmp_path / "a.cu"
    source.write_text("int x;\n")
    arch = run(["nvcc", "-gencode", "arch=compute_130,code=sm_130", "-c", source], tmp_path)
    assert "compute_130 is unknown to this nvcc" in explain_failure(arch, tmp_path)
    newer = run(["nvcc", "-Xcompiler", "-U__GNUC__,-D__GNUC__=99", "-c", source], tmp_path)
    assert re.match(r"this nvcc takes g\+\+ up to version \d+: ", explain_failure(newer, tmp_path))


def test_anything_else_is_shown_without_the_frames_of_ninja_and_torch():
    output = (
        f"Error building extension 'x': [1/2] c++\nFAILED: a.o\n{'c++ ' + '-I/long ' * 99}\n"
        'Traceback (most recent call last):\n  File "/torch/cpp_extension.py", line 3, in load\n'
        "unheard of\nninja: build stopped: subcommand failed.\n"
    )
    assert explain_failure(output, "/nowhere") == "unheard of"
    assert explain_failure("", "/nowhere") == "the build printed nothing that says why it failed"


def test_a_log_of_50_mb_takes_less_than_a_second(tmp_path):
    warning = "a.cpp:3:4: warning: unused ‘x’\n    3 | int x;\n      |     ^\n"
    noise = warning * (50_000_000 // len(warning))
    logs = [noise + "a.cpp:9:1: error: at last\n", "a.cpp:9:1: error: at last\n" + noise]
    logs += ["a.cpp:9:1: error: at last\n" + "x" * 50_000_000]
    for log in logs:
        started = time.process_time()
        assert explain_failure(log, tmp_path).startswith("a.cpp:9:1: error: at last")
        assert time.process_time() - started < 1


def test_no_text_is_followed_as_a_command(tmp_path):
    """A pipe or a device that the text names is not opened, and a path may be anything."""
    os.mkfifo(tmp_path / "pipe")
    for file in ("pipe", "/proc/kmsg", "/dev/zero", "..", "a\0b", "$(touch owned)", "x" * 5000):
        text = f"{file}:1:1: error: x\n{file}(1): error: y\nld: error: undefined symbol: {file}"
        explain_failure(text, tmp_path, ("pipe", "\0", "/dev/zero"))
        explain_failure(text.splitlines()[-1], tmp_path, ("pipe", "\0", "/dev/zero"))
    assert not (tmp_path / "owned").exists()


def test_no_text_whatever_makes_it_raise(tmp_path):
    """Pieces of real outputs and noise, in any order, cut anywhere."""
    rows = [mark for mark in globals().values() if hasattr(mark, "pytestmark")]
    cases = [mark for row in rows for mark in row.pytestmark if mark.name == "parametrize"]
    texts = [case[0] for mark in cases for case in mark.args[1] if isinstance(case, tuple)]
    texts = [text for text in texts if isinstance(text, str)]
    template = (
        'a.h:1:1: error: x\n  x\n  ^\n  detected during instantiation of "f<(" at line 3 of a.cu'
    )
    texts += [template, "a.cpp:1:2:   required from here\n" + template, HEADER, "  ^\n", "\n"]
    assert len(texts) > 50
    chance = random.Random(1)
    for _ in range(2000):
        parts = [*chance.choices(texts, k=4), chance.randbytes(9).decode(errors="replace")]
        chance.shuffle(parts)
        text = chance.choice(["", "\n", "\n  "]).join(parts)
        begin, end = sorted(chance.choices(range(len(text) + 1), k=2))
        assert explain_failure(text[begin:end], tmp_path, SOURCES)
    assert explain_failure("\ud800: undefined symbol: _Z\ud800", tmp_path)
