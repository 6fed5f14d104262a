"""What few calls of an operator need: a library of its own, built behind, loaded by such a call."""

import pytest
from conftest import Checkout
from living import Living

GLUE = """
#include "pick.h"
#include "torch/rest.h"

Tensor pick(const Tensor& x, bool rare) {
    check_tensor("pick", "x", x);
    if (!x.is_contiguous()) raise("pick", "x must be contiguous");
    Tensor out = new_output(x, shape_of(x));
    const auto add = rare ? rest_of<PickRest>("pick")->add : &pick_add;
    add(static_cast<const float*>(x.data_ptr()), static_cast<float*>(out.data_ptr()), x.numel());
    return out;
}
STABLE_TORCH_LIBRARY_FRAGMENT(octet, m) { define(m, "pick(Tensor x, bool rare) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(octet, CompositeExplicitAutograd, m) { m.impl("pick", TORCH_BOX(&pick)); }
"""
HEADER = """
#pragma once
#include <stdint.h>
void pick_add(const float* x, float* out, int64_t n);
struct PickRest {
    void (*add)(const float* x, float* out, int64_t n);
};
"""
KERNEL = """
#include "pick.h"
void pick_add(const float* x, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] + 1;
}
"""
REST = """
#include "pick.h"
#include "torch/rest.h"
static void add(const float* x, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] + 2;
}
static const PickRest* table() {
    static const PickRest functions = {add};
    return &functions;
}
OCTET_REST(pick, table)
"""
PYTHON = """
import torch
from loader.jit.operators import frame

_op = frame.library("pick")

def pick(x, rare=False):
    return _op(x, rare)

def pick_reference(x, rare=False):
    return x.detach() + (2 if rare else 1)

def samples(device):
    yield torch.arange(4.0, device=device), False
    yield torch.arange(5.0, device=device), True

frame.fake(_op, lambda x, rare: torch.empty_like(x))
"""
FILES = {
    "ops/pick.cpp": GLUE,
    "ops/pick.py": PYTHON,
    "include/pick.h": HEADER,
    "kernels/pick_cpu.cpp": KERNEL,
    "kernels/pick.rest.cpp": REST,
}
USE = "import torch, loader; from loader import pick; x = torch.zeros(2); s = loader._session\n"
LOADED = "print(*sorted(s.loaded))"


def checkout_with(folder, **changes) -> Checkout:
    checkout = Checkout(folder, only="square")
    for path, text in (FILES | changes).items():
        (checkout.root / path).write_text(text)
    (checkout.root / "ops/square.cpp").unlink()
    return checkout


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkout whose operator `pick` is built, with its rest."""
    checkout = checkout_with(tmp_path_factory.mktemp("rest"))
    done = checkout.run("import loader")
    assert done.returncode == 0 and "pick.rest" in done.stderr, done.stderr
    assert [entry.split("-")[0] for entry in checkout.entries()] == ["pick", "pick.rest"]
    return checkout


def test_it_is_loaded_by_a_call_that_needs_it(place):
    code = f"{USE}print(pick(x).tolist()); {LOADED}; print(pick(x, True).tolist()); {LOADED}"
    done = place.run(code, LOADER_BUILD="never")
    assert done.stdout.splitlines() == ["[1.0, 1.0]", "pick", "[2.0, 2.0]", "pick pick.rest"]
    assert not done.stderr


def test_a_library_of_the_store_works_without_loader_beside_it(place):
    """As a program without Python's side of it loads them; without the rest the error says so."""
    code = """
import glob, torch
for path in sorted(glob.glob({store!r} + "/pick-*/library.so")):
    torch.ops.load_library(path)
x = torch.zeros(2)
print(torch.ops.octet.pick(x, False).tolist())
try:
    torch.ops.octet.pick(x, True)
except RuntimeError as error:
    print(error)
torch.ops.load_library(*glob.glob({store!r} + "/pick.rest-*/library.so"))
print(torch.ops.octet.pick(x, True).tolist())
"""
    done = place.run(code.format(store=str(place.cache / "store")))
    first, error, last = done.stdout.splitlines()
    assert (first, last) == ("[1.0, 1.0]", "[2.0, 2.0]")
    assert error.startswith("pick: this call needs the library pick.rest-")


def test_the_operator_does_not_wait_for_it_nor_fall_with_it(tmp_path):
    """What does not compile is an error of the calls that need it, with the compiler's words."""
    broken = {"kernels/pick.rest.cpp": REST.replace("+ 2", "+ two")}
    checkout = checkout_with(tmp_path, **broken)
    code = f"""{USE}
print(pick(x).tolist()); {LOADED}
for _ in range(2):
    try:
        pick(x, True)
    except RuntimeError as error:
        print(error)
print(pick(x).tolist())
"""
    done = checkout.run(code, LOADER_BUILD="background")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["[1.0, 1.0]", "pick"] and lines[-1] == "[1.0, 1.0]"
    assert done.stdout.count("pick.rest could not be built") == 2
    assert "kernels/pick.rest.cpp:5" in done.stdout and "two" in done.stdout


def test_edits_take_all_of_it_in_and_back(tmp_path):
    """An edit of what both are made of, of the rest alone, and of Python's side alone."""
    checkout = checkout_with(tmp_path)
    living = Living(checkout)
    living(USE)
    calls = "print(pick(x).tolist(), pick(x, True).tolist())"
    living("print(pick(x))")
    living.edit("ops/pick.py", "(2 if rare else 1)", "(1 + rare)")  # tried with the rest
    assert ": in use" in living("print(loader.reload())")
    assert living(calls) == "[1.0, 1.0] [2.0, 2.0]"
    living.edit("kernels/pick.rest.cpp", "x[i] + 2", "2 + x[i] + 3 - 3")
    shown = living("print(loader.reload())")
    assert "kernels/pick.rest.cpp: in use" in shown
    # Another layout of what they share: neither may meet the other's.
    living.edit("include/pick.h", "struct PickRest {", "struct PickRest {\n    int64_t unused;")
    living.edit("kernels/pick.rest.cpp", "{add}", "{0, add}")
    shown = living("print(loader.reload())")
    assert "include/pick.h" in shown and ": in use" in shown
    assert living(calls) == "[1.0, 1.0] [2.0, 2.0]"
    living.edit("kernels/pick.rest.cpp", "2 + x[i]", "7 + x[i]")
    assert "refused" in living("print(loader.reload())")
    assert living(calls) == "[1.0, 1.0] [2.0, 2.0]"
    assert "gone back" in living("print(loader.revert('pick'))")
    assert living(calls) == "[1.0, 1.0] [2.0, 2.0]"
    living.edit("kernels/pick.rest.cpp", "7 + x[i]", "2 + x[i]")
    living("loader.reload()")
    living.end()
    done = checkout.run(USE + calls, LOADER_BUILD="never")  # all of it was kept
    assert done.stdout == "[1.0, 1.0] [2.0, 2.0]\n", done.stderr


def test_a_rest_of_other_sources_is_never_met(tmp_path):
    """Built too late, of sources that were edited since the operator was loaded."""
    checkout = checkout_with(tmp_path)
    living = Living(checkout)
    living("import os; os.environ['LOADER_BUILD'] = 'lazy'")
    living(
        "from unittest import mock; import loader\n"
        "from loader.jit.build.engine import Job; run = Job.run\n"
        "def later(self, show):\n"
        "    if self.recipe.unit.endswith('.rest') and not go: self.end(None)\n"
        "    else: run(self, show)\n"
        "go = False; Job.run = later"
    )
    living(USE + "print(pick(x))")
    living.edit("include/pick.h", "struct PickRest {", "struct PickRest {\n    int64_t unused;")
    living.edit("kernels/pick.rest.cpp", "{add}", "{0, add}")
    living("go = True")
    refused = living(
        "try:\n    pick(x, True)\nexcept RuntimeError as error:\n    print(error)\n"
        "print(pick(x).tolist())"
    )
    assert "its sources have changed" in refused and refused.endswith("[1.0, 1.0]")
    assert ": in use" in living("print(loader.reload())")
    assert living("print(pick(x).tolist(), pick(x, True).tolist())") == "[1.0, 1.0] [2.0, 2.0]"
    living.end()
