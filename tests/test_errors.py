"""What is picked out of a compiler's output."""

from loader.jit.errors import first_errors

GCC = """[1/3] c++ -MMD -c a.cpp -o a.o
FAILED: [code=1] a.o
c++ -c a.cpp -o a.o
In file included from a.cpp:1:
a.cpp: In function 'int f()':
a.cpp:12:12: error: 'undeclared' was not declared in this scope
   12 |     return undeclared;
      |            ^~~~~~~~~~
ninja: build stopped: subcommand failed."""

NVCC = """[1/3] nvcc -c a.cu -o a.o
kernels/a.cu(7): error: identifier "oops" is undefined
      oops();
      ^

1 error detected in the compilation of "kernels/a.cu"."""


def test_gcc():
    assert first_errors(GCC).splitlines() == GCC.splitlines()[5:8]


def test_nvcc():
    assert first_errors(NVCC).splitlines() == [
        'kernels/a.cu(7): error: identifier "oops" is undefined',
        "      oops();",
        "      ^",
    ]


def test_missing_header():
    text = "a.cpp:3:10: fatal error: nothing.h: No such file or directory\n    3 | #include <nothing.h>"
    assert first_errors(text) == text


def test_linkers():
    for line in (
        "a.o: in function `f': a.cpp:(.text+0x5): undefined reference to `launch'",
        "ld.lld: error: undefined symbol: launch",
        "/usr/bin/ld: cannot find -lcudart: No such file or directory",
        "/usr/bin/ld.gold: error: cannot open libstdc++.so: No such file or directory",
    ):
        assert first_errors(f"[2/2] c++ a.o\n{line}\ncollect2: error: ld returned 1") == line


def test_anything_else_is_shown_without_ninja_s_frame():
    text = f"[1/2] x\nFAILED: a.o\n{'c++ ' + '-I/long ' * 99}\n/usr/bin/nvcc: not found\nninja: stopped"
    assert first_errors(text) == "/usr/bin/nvcc: not found"


def test_no_more_than_three():
    text = "\n".join(f"a.cpp:{i}:1: error: wrong" for i in range(9))
    assert len(first_errors(text).splitlines()) == 3
