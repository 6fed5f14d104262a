"""Checks of Python and its packages."""

import platform
import sys
import sysconfig
from pathlib import Path

from .context import Context, Found, version


def check_python(context: Context) -> Found:
    """The interpreter's version."""
    found = f"{platform.python_version()}, {sys.executable}"
    if version(found) < (3, 10):
        return "error", f"{found}; 3.10 or newer is needed", "make an environment with a newer one"
    return "ok", found


def check_headers(context: Context) -> Found:
    """The headers that modules made with pybind11 include; operators do without."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if header.exists():
        return "ok", str(header)
    package = f"python3-dev python{sysconfig.get_python_version()}-dev"
    found = f"{header} is missing; operators do without, modules made with pybind11 do not"
    return "warning", found, f"one of them has it:\n$ apt install {package}"


def check_torch(context: Context) -> Found:
    """Try that it imports, and is new enough."""
    facts = context.facts()
    if error := facts.get("torch_error"):
        module = "numpy" if "numpy" in error.lower() else "torch"
        return "error", f"does not import: {error}", f"$ pip install --force-reinstall {module}"
    cuda = f"CUDA {facts['cuda']}" if facts["cuda"] else "built without CUDA"
    found = f"{facts['torch']} (git {facts['git'][:8]}), {cuda}"
    if version(found) < (2, 10):
        return "error", f"{found}; 2.10 or newer is needed", "$ pip install -U 'torch>=2.10'"
    return "ok", found


def check_numpy(context: Context) -> Found:
    """Try that torch can use the NumPy that is here."""
    context.cuda  # noqa: B018  not without torch
    facts = context.facts()
    error, there = facts.get("numpy_error"), facts.get("numpy", "")
    if not error:
        return "ok", there
    if "No module named 'numpy'" in error:
        return "ok", "not installed; operators do without"
    found = f"torch cannot use NumPy {there}: {error}"
    return "warning", found, "$ pip install --upgrade --force-reinstall numpy"


def check_setuptools(context: Context) -> Found:
    """The package that torch.utils.cpp_extension imports: that was tried."""
    facts, cure = context.facts(), "$ pip install 'setuptools>=70'"
    found = facts.get("setuptools", "")
    if error := facts.get("setuptools_error"):
        return "error", f"torch.utils.cpp_extension needs it: {error}", cure
    if error := facts.get("extension_error"):
        return "error", f"{found}; torch.utils.cpp_extension does not import: {error}", cure
    if version(found) < (70,):
        return "warning", f"{found}; 70 or newer is expected", cure
    return "ok", found
