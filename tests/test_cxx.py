"""What is code in a C++ source and what is not, without a compiler."""

import re
import shutil
import subprocess

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from loader.jit.errors import cxx

SOURCES = sorted(
    file
    for room in ("ops", "kernels", "include", "examples")
    for file in (ROOT / room).rglob("*")
    if file.suffix in (".h", ".cpp", ".cu", ".cuh")
)
# The two patterns that this lexer took the place of, each right on what it was used for.
EXTENSION = re.compile(
    r'R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"|//(?:[^\n]|(?<=\\)\n)*|/\*.*?\*/'
    r"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'",
    re.DOTALL,
)
SOURCE_MODULE = re.compile(
    r'//(?:\\\n|[^\n])*|/\*.*?\*/|R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"'
    r"|\"(?:\\.|[^\"\\\n])*\"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'",
    re.DOTALL,
)
# Pieces of a source with what is left of each.
CODE = [
    "int f(char c);",
    "1'000'000",
    "0xFF'FF",
    "a / b * c",
    "x->y",
    "u8",
    "\n",
    " ",
    "R",
    "#if A\n",
]
LITERALS = [
    '"text"', '"// none"', r'"\""', r'"\\"', '"a\\\nb"', "'c'", r"'\''", "'\"'", "u8'c'", 'L"wide"',
    'R"(a " // b)"', 'R"x(a )" b)x"', 'u8R"(\n)"', "'//'", '"/*"',
]  # fmt: skip
COMMENTS = [
    "// text\n", "// it's \"odd\n", "/* a */", "/* // */", "/* \" ' */", "// a \\\n b\n",
    "/\\\n* a *\\\n/", "/\\\n/ a\n", "/**/", "/* a\n b */", "// R\"(\n",
]  # fmt: skip


def blanks(text):
    return re.sub(r"[^\r\n]", " ", text)


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.name)
def test_the_repositorys_own_sources_are_read_as_both_lexers_before_read_them(file):
    text = file.read_text()
    for pattern in (EXTENSION, SOURCE_MODULE):
        assert cxx.blanked(text) == pattern.sub(lambda match: blanks(match[0]), text)


@given(st.lists(st.sampled_from([(kind, piece) for kind in ("CODE", "LITERALS", "COMMENTS")
                                 for piece in globals()[kind]]), max_size=20))  # fmt: skip
def test_blanking_takes_just_what_is_no_code(pieces):
    """Pieces stand apart, as an identifier before a string would become its prefix."""
    text = " ".join(piece for _, piece in pieces)
    bare = " ".join(piece if kind == "CODE" else blanks(piece) for kind, piece in pieces)
    told = " ".join(piece if kind != "COMMENTS" else blanks(piece) for kind, piece in pieces)
    assert cxx.blanked(text) == bare
    assert cxx.blanked(text, strings=False) == told


@given(st.text(alphabet="/*\\\"'R()u8L xn1\n\r#", max_size=60))
def test_blanking_keeps_length_and_line_breaks_of_any_text(text):
    for found in (
        cxx.blanked(text),
        cxx.blanked(text, strings=False),
        cxx.without_directives(cxx.blanked(text)),
    ):
        assert len(found) == len(text)
        assert [i for i, c in enumerate(found) if c in "\r\n"] == [
            i for i, c in enumerate(text) if c in "\r\n"
        ]
        assert all(new in (old, " ") for new, old in zip(found, text, strict=True))


@given(st.text(alphabet="/*\\\"' xn1\n", max_size=40))
def test_blanking_twice_changes_nothing_more_in_what_ends(text):
    once = cxx.blanked(f"{text}\n")
    assert cxx.blanked(once) == once or re.search(r"[\"'\\]", once)


@pytest.mark.parametrize(
    "text, bare",
    [
        ("int n = 1'000'000; char c = 'x';", "int n = 1'000'000; char c =    ;"),
        ("auto c = u8'x';", "auto c =      ;"),
        ("int x; // it's \\\n still 'one'\nint y;", None),
        ('auto s = PRIu64"x";', "auto s = PRIu64   ;"),
        ('FOOR"(x)";', "FOOR     ;"),
        ("/* never ends", "             "),
        ("#error don't\nint x;", "#error don't\nint x;"),
    ],
)
def test_odd_cases(text, bare):
    if bare is None:
        assert re.sub(r"\s+", " ", cxx.blanked(text)) == "int x; int y;"
    else:
        assert cxx.blanked(text) == bare


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on PATH")
def test_the_compiler_sees_the_same_words(tmp_path):
    """g++ drops comments itself: what is left of each side holds the same words in order."""
    pieces = [*LITERALS[:11], *COMMENTS, "1'000"]
    text = "\n".join(f"a{i} {piece} b{i};" for i, piece in enumerate(pieces))
    (tmp_path / "x.cpp").write_text(f"{text}\n")
    done = subprocess.run(
        ["g++", "-std=c++17", "-E", "-P", "x.cpp"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = re.compile(r"\b[ab]\d+\b")
    assert words.findall(cxx.blanked(text)) == words.findall(cxx.blanked(done.stdout))


def test_directives_and_includes():
    text = (
        '#include <a.h> // "b.h"\n  #  include "c.h"\n/* #include <d.h>\n#include <e.h> */\n'
        'const char* s = R"(\n#include <f.h>\n)";\n#include MACRO\n#define X(a) \\\n  a\nint y;\n'
    )
    assert cxx.includes(text) == [cxx.Include("a.h", False), cxx.Include("c.h", True)]
    named = [(d.name, " ".join(d.rest.split())) for d in cxx.directives(text)]
    assert ("include", "MACRO") in named and ("define", "X(a) \\ a") in named
    assert "int y;" in cxx.without_directives(text) and "X(a)" not in cxx.without_directives(text)


def test_words():
    assert cxx.identifiers("int f(T x) { return x.sinn() + 1.f + 0x1F + a->b; }") == {
        "f", "T", "x", "sinn", "a", "b"
    }  # fmt: skip
    assert cxx.closing("f(a(b), c) d", 2, "(", ")") == 10
    assert cxx.literal('a"\\\n??=') == '"a\\"\\\\\\n?\\?="'


@pytest.mark.parametrize(
    ("said", "spelt"),
    [
        ("undefined symbol: _Z1fi", "undefined symbol: f(int)"),
        ("'_ZN1n1gERKSt6vectorIiSaIiEE.cold'",
         "'n::g(std::vector<int, std::allocator<int> > const&) [clone .cold]'"),
        ("a.o: `_ZTV1A' and _Z1fv@@LIB_1, _Zq, my_Z1fi", "a.o: `vtable for A' and f()@@LIB_1, _Zq, my_Z1fi"),
        ("plain", "plain"),
    ],
)  # fmt: skip
def test_symbols_are_spelt_as_in_the_source(said, spelt):
    assert cxx.demangled(said) == spelt
