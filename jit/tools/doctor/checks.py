"""The list of checks: one for each thing that a build needs, in the order of the report."""

from .checkout import (
    check_settings,
    check_sources,
)
from .compilers import (
    check_compiler,
    check_host_compiler,
    check_nvcc,
    check_toolkit,
)
from .disk import (
    check_cache,
    check_clock,
    check_disk,
    check_flock,
    check_temporary,
)
from .graphics import (
    check_architectures,
    check_driver,
    check_gpu,
)
from .packages import (
    check_headers,
    check_numpy,
    check_python,
    check_setuptools,
    check_torch,
)

CHECKS = (
    ("Python", check_python),
    ("Python.h", check_headers),
    ("torch", check_torch),
    ("NumPy", check_numpy),
    ("setuptools", check_setuptools),
    ("C++ compiler", check_compiler),
    ("nvcc", check_nvcc),
    ("nvcc and torch", check_toolkit),
    ("nvcc and C++", check_host_compiler),
    ("architectures", check_architectures),
    ("driver", check_driver),
    ("GPU", check_gpu),
    ("settings", check_settings),
    ("sources", check_sources),
    ("disk", check_disk),
    ("temporary files", check_temporary),
    ("file locks", check_flock),
    ("clock", check_clock),
    ("cache", check_cache),
)
