"""Programs that were stored run in a fresh process after `import loader`, no operator being named."""

import re

import pytest
import torch
from conftest import Checkout

import loader

STORE = """
import torch, loader
def f(x):
    return torch.ops.octet.square(x) + 1
torch.jit.trace(f, torch.ones(3), check_trace=False).save("f.pt")
"""
RUN = """
import torch, loader
f = torch.jit.load("f.pt")
assert "library.so" not in open("/proc/self/maps").read()
x = torch.ones(3, requires_grad=True)
for _ in range(3):
    assert (f(torch.ones(3) * 3) == 10).all()
(2 * f(x)).sum().backward()
assert x.grad.tolist() == [4.0] * 3
assert loader.square(torch.ones(3) * 3).tolist() == [9.0] * 3 and f(torch.ones(2) * 2).sum() == 10
"""

TORCHS_OWN = "ignore:`torch.jit.load` is deprecated"  # a warning, in some versions


def test_a_torchscript_archive_needs_no_more_than_the_import(checkout):
    first = checkout.run(STORE, PYTHONWARNINGS="ignore")
    assert first.returncode == 0, first.stderr
    for mode in ("background", "eager", "never", "lazy"):
        again = checkout.run(RUN, LOADER_BUILD=mode, PYTHONWARNINGS=TORCHS_OWN)
        assert (again.returncode, again.stderr) == (0, ""), mode


def test_an_edited_library_replaces_the_stand_ins_as_well(checkout):
    """Another key, other schemas perhaps: the old ones are not declared for it."""
    assert checkout.run(STORE, PYTHONWARNINGS="ignore").returncode == 0
    header = checkout.root / "include/square.h"
    header.write_text(header.read_text() + "// edited\n")
    done = checkout.run("import torch, loader; assert loader.square(torch.ones(2)).sum() == 2")
    assert done.returncode == 0, done.stderr
    again = checkout.run(RUN, PYTHONWARNINGS=TORCHS_OWN)
    assert (again.returncode, again.stderr) == (0, "")


def test_a_child_process_and_a_fork_define_what_is_theirs(checkout):
    assert checkout.run(STORE, PYTHONWARNINGS="ignore").returncode == 0
    code = """
import os, subprocess, sys, torch, loader
use = "import loader, torch; assert loader.square(torch.ones(2)).sum() == 2"
pid = os.fork()
if pid == 0:
    os._exit(0 if loader.square(torch.ones(2)).sum() == 2 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
(library,) = loader._session.store.path.glob("square-*/library.so")
alone = f"import torch; torch.ops.load_library({str(library)!r}); print(torch.ops.octet.square(torch.ones(2)))"
done = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True)
assert done.returncode == 0 and not done.stderr, done.stderr
assert subprocess.run([sys.executable, "-c", use]).returncode == 0
"""
    done = checkout.run(code)
    assert done.returncode == 0, done.stderr


def test_every_operator_s_schemas_are_declared(tmp_path):
    checkout = Checkout(tmp_path)
    code = """
import torch, loader
for name in loader._session.units:
    getattr(loader, name)
names = {n[7:] for n in torch._C._dispatch_get_all_op_names() if n.startswith("octet::")}
print(sorted(n for n in names if loader._session.owner(n)))  # of the units, not of their rests
"""
    first = checkout.run(code)
    assert first.returncode == 0, first.stderr
    again = checkout.run(code.replace("    getattr(loader, name)", "    pass"))
    assert again.stdout == first.stdout and "grid_sample_backward" in again.stdout


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused_by_name(layout):
    nested = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], layout=layout)
    message = "x must be a dense tensor, got a nested one; use x.to_padded_tensor(0.0), or each of"
    for form in (loader.square, loader.square_fw):
        with pytest.raises(RuntimeError, match=re.escape(f"square: {message} x.unbind()")):
            form(nested)
    with pytest.raises(RuntimeError, match=re.escape(f"square: {message} x.unbind()")):
        loader.square_bw(torch.ones(3, 4), nested)
    whole = loader.square(nested.to_padded_tensor(0.0))
    assert whole.shape == (2, 3, 4) and whole.sum() == 20
