"""`python -m loader new X --args a b t`: square's row of files for any number of arguments."""

import keyword
import re
import textwrap

_WIDTH = 100
MOST = 15  # kMaxInputs of include/elementwise.h less grad_out

CXX_WORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t
char32_t class co_await co_return co_yield compl concept const const_cast consteval constexpr
constinit continue decltype default delete do double dynamic_cast else enum explicit export extern
false float for friend goto if inline int long main mutable namespace new noexcept not not_eq
nullptr operator or or_eq private protected public register reinterpret_cast requires return short
signed sizeof static static_assert static_cast struct switch template this thread_local throw true
try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
"""


def check_arguments(name: str, arguments: list[str], like: str) -> None:
    """ValueError where an operator cannot have arguments of these names."""
    if like != "square":
        raise ValueError(f"--args makes an operator of its own; leave out --like {like}")
    if not 1 <= len(arguments) <= MOST:
        raise ValueError(f"--args takes 1 to {MOST} names, got {len(arguments)}")
    for argument in arguments:
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", argument):
            raise ValueError(f"--args takes names in lower case, such as a b t; got {argument!r}")
        if keyword.iskeyword(argument) or argument in CXX_WORDS.split():
            raise ValueError(f"--args: {argument!r} is a word of a language; choose another")
        if argument in (name, "grad_out", "output_mask") or arguments.count(argument) > 1:
            raise ValueError(f"--args: {argument!r} has a meaning already; choose another")


def formula(names: list[str]) -> str:
    """Return what the new operator computes at first: the sum of its arguments' squares."""
    return " + ".join(f"{name} * {name}" for name in names)


def with_arguments(file: str, text: str, names: list[str]) -> str:
    """The text of one of square's files with these arguments instead of `x`."""
    changes = {
        "include/X.h": _header,
        "ops/X.cpp": _registration,
        "ops/X.py": _python,
        "tests/test_X.py": _test,
    }
    for old, new in changes.get(file, lambda _: ())(names):
        text, count = re.subn(old, lambda _, new=new: new, text, flags=re.MULTILINE)
        assert count, f"{file.replace('X', 'square')} has changed: nothing fits {old}"
    return text


def _header(names: list[str]) -> list[tuple[str, str]]:
    taken = [f"A {name}" for name in names]
    gradients = ", ".join(f"2 * grad_out * {name}" for name in names)
    several = len(names) > 1
    result = f"Several<A, {len(names)}>" if several else "A"
    forward = _filled("    HD A operator()(", taken, ")")
    backward = _filled(f"    HD {result} operator()(", ["A grad_out", *taken], ")")
    return [
        (r"^    HD A operator\(\)\(A x\)", forward),
        (r"^    HD A operator\(\)\(A grad_out, A x\)", backward),
        (r"x \* x(?=;)", formula(names)),
        (r"2 \* grad_out \* x(?=;)", f"{{{gradients}}}" if several else gradients),
    ]


def _filled(before: str, items: list[str], after: str) -> str:
    """Items between two texts, broken as clang-format does: below the first of them."""
    words = ", ".join(item.replace(" ", "\0") for item in items) + after
    room = _WIDTH - len(before) - len(" const {")
    return (before + ("\n" + " " * len(before)).join(textwrap.wrap(words, room))).replace("\0", " ")


def _registration(names: list[str]) -> list[tuple[str, str]]:
    return [(r", x\)$", ", " + ", ".join(names) + ")")]


def _python(names: list[str]) -> list[tuple[str, str]]:
    first, *rest = names
    computed = formula(names)
    typed = [f"{name}: Tensor" for name in names]

    def signature(suffix):
        line = f"def square{suffix}({', '.join(typed)}) -> Tensor:"
        inner = "".join(f"    {argument},\n" for argument in typed)
        # The new name is not known here: 30 characters are left for it.
        return line if len(line) < _WIDTH - 30 else f"def square{suffix}(\n{inner}) -> Tensor:"

    like_it = f": shape, dtype and device of `{first}`, any strides.\n"
    also = "".join(f"        {name}{like_it}" for name in rest)
    dtypes = "float32, float64, float16 or bfloat16, on the CPU or a CUDA device"
    first_line = f"        {first}: any shape and strides,\n            {dtypes}.\n"
    return [
        (r"Square each element\.", f"Compute {computed}, element by element."),
        (r"^def square\(x: Tensor\) -> Tensor:", signature("")),
        (r"^def square_reference\(x: Tensor\) -> Tensor:", signature("_reference")),
        (r"x \* x", computed),
        (r"^        x: any (.*\n){2}", first_line + also),
        (r"of `x`; differentiable", f"of `{first}`; differentiable"),
        (r"TypeError: `x` is", "TypeError: an argument is"),
        (r"RuntimeError: its dtype", "RuntimeError: a shape, a dtype"),
        (r"return _square\(x\)", f"return _square({', '.join(names)})"),
    ]


def _test(names: list[str]) -> list[tuple[str, str]]:
    count = len(names)
    known = r"assert loader.square\(x\).tolist\(\) == \[9, 0, 0.25\]"
    slopes = r"assert loader.square_bw\(torch.ones_like\(x\), x\).tolist\(\) == \[-6, 0, 1\]"
    first = (r'= "square", 1, "x"', f'= "square", {count}, "{names[0]}"')
    if count == 1:
        return [first]
    return [
        first,
        (
            known,
            f"args = [x] * {count}\n"
            f"        assert loader.square(*args).tolist() == [{9 * count}, 0, {count / 4}]",
        ),
        (
            slopes,
            "for grad in loader.square_bw(torch.ones_like(x), *args):\n"
            "            assert grad.tolist() == [-6, 0, 1]",
        ),
    ]
