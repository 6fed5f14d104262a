"""An operator is a row of files: without them, all the others are what they were."""

import sys

import pytest
import torch
from conftest import ROOT, Checkout
from torch.testing import assert_close

import loader

OPERATORS = sorted(file.stem for file in (ROOT / "ops").glob("*.cpp"))

USE_ANOTHER = """
import torch, loader
x = torch.arange(3.0)
if {other!r} == "square":
    assert loader.square(x).tolist() == [0.0, 1.0, 4.0]
else:
    assert loader.add2(x, x).tolist() == [0.0, 2.0, 4.0]
assert not hasattr(loader, {name!r}) and not [n for n in dir(loader) if n.startswith({name!r})]
for public in loader._ELSEWHERE:
    getattr(loader, public)
print("accelerate_torch" in dir(loader))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One for all: what is used of the others is built once."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("name", OPERATORS)
def test_any_operator_can_be_deleted(name, tmp_path, cache):
    checkout = Checkout(tmp_path)
    for room in ("include", "kernels", "ops"):
        for path in (checkout.root / room).glob(f"{name}[._]*"):
            path.unlink()
        for folder in (checkout.root / room).glob(name):
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    other = "add2" if name == "square" else "square"
    done = checkout.run(
        USE_ANOTHER.format(name=name, other=other), LOADER_BUILD="lazy", LOADER_CACHE_DIR=cache
    )
    assert done.stdout == f"{name != 'grid_sample'}\n", done.stderr


@pytest.mark.parametrize("name", OPERATORS)
def test_the_python_side_can_be_run_again(name):
    """What `loader.reload()` does after an edit of ops/X.py: torch takes a fake kernel once only."""
    from loader.jit.live.python_side import python_files, run_again

    operator, reference = getattr(loader, name), getattr(loader, f"{name}_reference")
    session, registered = loader._session, getattr(torch.ops.octet, name).default
    run_again(session, name, dict.fromkeys(python_files(session, name)))
    module = sys.modules[f"loader.ops.{name}"]
    assert getattr(module, name) is operator  # whoever holds it has the new code
    assert getattr(module, f"{name}_reference") is reference
    assert getattr(torch.ops.octet, name).default is registered  # which modes compare with
    (arguments, *_) = module.samples("cpu")
    assert_close(operator(*arguments), reference(*arguments), rtol=1e-3, atol=1e-3)
