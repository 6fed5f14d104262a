"""Fixtures of the whole suite: the devices, and caches and checkouts that a test may spoil."""

import contextlib
import gc
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import compiler
import pytest
import ranks
import standby
import torch
import warm

ROOT = Path(__file__).parent.parent
ROOMS = ("jit", "ops", "kernels", "include")
TAG, HASHED = sys.implementation.cache_tag, py_compile.PycInvalidationMode.CHECKED_HASH
# Otherwise each process that calls torch.compile starts as many more that import torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Otherwise each that compiles C++ tries a dozen instruction sets, in a new process with torch each.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# Otherwise each that imports NumPy or SciPy has threads that wait for work in a loop.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What takes longest, the longest first, so that no core waits for another in the end.
LONGEST = (
    *("sanitizers", "build::test_every_cuda", "three_ways", "inline", "damage", "archives"),
    "concurrency",
    *(
        "interrupted_edits",
        "reload",
        "hostile",
        "node_builds",
        "new",
        "install",
        "notebook",
        "trial::test_mistakes",
    ),
    *("grid_sample::TestGridSample::test_compiles", "trial", "build", "examples", "background"),
    *("store", "doctor", "accelerate_torch", "source", "grid_sample"),
)
# Tests for one worker: they share what takes seconds to make.
TOGETHER = (
    *("inline", "interrupted_edits::(?!test_operators_in|test_what_is_built|test_the_first)"),
    *(
        "docs",
        "judge",
        "new",
        "install",
        "library",
        "operator_rows",
        "source_arguments",
        "source_builds",
    ),
    "three_ways::test_(?!trap_(?!before|the_source|two_builds)|a_|the_builds_with|the_cpp)",
    *("three_ways::test_the_cpp", "build::test_a_damaged", "reload::(?!test_random)"),
    *("trial::test_a_(wrong|harmless|difference)", "key::test_(differing|the_random)"),
    "trial::test_(every_operator|what_the_reference)",
    *("sanitizers::test_planted", "archives", "levels"),
    "(dtensor|sharded|training)",  # one group of four processes
)


def pytest_addoption(parser):
    parser.addoption("--sharded-seed", type=int, default=0, help="of the first random case")
    parser.addoption("--seed", type=int, default=0, help="other random numbers in every test")


def pytest_configure():
    # A shell starts what it runs behind without SIGINT, and children of such a run would never see
    # the Ctrl-C that tests send them.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item):
    """Have torch's random numbers depend on the test alone, not on those that this worker ran before."""
    seed = zlib.crc32(f"{item.config.getoption('seed')} {item.nodeid}".encode())
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


_modules: list[int] = []  # imported when `freeze` was last at work


def freeze() -> None:
    """Have no collection look through modules, a million objects of torch's: a sixth of the time."""
    if not _modules or len(sys.modules) > _modules[-1] + 100:  # torch.compile brings a thousand
        gc.collect()
        gc.freeze()
        _modules.append(len(sys.modules))


def pytest_collection_finish():
    freeze()


def pytest_runtest_logfinish():
    freeze()
    # Other workers, and processes that tests start, need what one has had of a GPU's memory.
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 29:
        torch.cuda.empty_cache()


def pytest_unconfigure():
    if "ranks" in sys.modules:
        sys.modules["ranks"].close()
    warm.python.close()


def name_of(nodeid: str) -> str:
    """`file::test` without what all of them have."""
    return nodeid.partition("test_")[2].replace(".py::", "::", 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests one by one to whoever is free, but for those of TOGETHER."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = name_of(nodeid)
            return next((group for group in TOGETHER if re.match(group, name)), nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_collection_modifyitems(items):
    def rank(item) -> int:
        name = name_of(item.nodeid)
        return next((i for i, long in enumerate(LONGEST) if name.startswith(long)), len(LONGEST))

    items.sort(key=rank)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no GPU on this machine")
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(skip)


# Of the battery, what goes through Python as well as by jit/operators/node.cpp.
IN_BOTH_WAYS = (
    "test_gradients_only_where_they_are_asked_for",
    "test_third_derivative",
    "test_function_transforms",
    "test_bad_input_gets_one_clear_message",
    "test_checkpoints_and_hooks",
)


def pytest_generate_tests(metafunc):
    if metafunc.function.__name__ in IN_BOTH_WAYS:
        metafunc.parametrize("way", ["C++", "Python"], indirect=True)


@pytest.fixture(autouse=True)  # or pytest leaves it out where there are other parameters
def way(request):
    """How operators are called in this process: by the node, or by Python alone."""
    if not hasattr(request, "param"):
        yield
        return
    from loader.jit.operators.node import NODE

    if request.param == "C++":
        assert NODE.build() is None
        assert NODE.module
    NODE.use(request.param == "C++")
    yield
    NODE.use(True)


def shared_folder(tmp_path_factory, config) -> Path:
    """A folder of the session's, the same for all its workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if hasattr(config, "workerinput") else base  # a session in a test is none


@pytest.fixture(scope="session", autouse=True)
def compilers(tmp_path_factory, pytestconfig):
    """What checkouts compile with, the same for all workers of a session."""
    base = shared_folder(tmp_path_factory, pytestconfig)
    os.environ["OCTET_STANDBY"] = str(standby.install(base / "standby"))
    os.environ["OCTET_COMPILERS"] = str(compiler.install(base / "compilers"))
    put_bytecode(base / "bytecode")
    yield
    for made in base.glob("compilers/*/prelude.h.gch"):  # 60 MB each, and pytest keeps folders
        made.unlink(missing_ok=True)


def put_bytecode(folder: Path) -> None:
    """Compile what checkouts copy, unless another worker does: each process in one would else."""
    draft = folder.with_name(".bytecode")
    with contextlib.suppress(FileExistsError):
        draft.mkdir()  # there for as long as somebody is at it; from then on `folder` is
        if folder.exists():
            draft.rmdir()
            return
        for file in (*ROOT.glob("*.py"), *(f for r in ROOMS for f in (ROOT / r).rglob("*.py"))):
            path = file.relative_to(ROOT)
            made = draft / path.parent / "__pycache__" / f"{file.stem}.{TAG}.pyc"
            py_compile.compile(str(file), str(made), invalidation_mode=HASHED)
        draft.rename(folder)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    """Each device in turn; those that need a GPU are skipped without one."""
    return request.param


def start_python(
    code: str, cwd, env: dict, start_new_session=False, fresh=False, stdin: int = 0
) -> warm.Process:
    """A process that runs code as `python -c` does, not waited for.

    It is forked from a warm Python that has imported torch already, unless it is to be `fresh`, or
    `env` has what only a new process takes up, such as LD_PRELOAD.
    """
    if not fresh and ("torch" in code or "loader" in code) and warm.python.fits(env):
        return warm.python.start(code, cwd, env, start_new_session, stdin)
    return subprocess.Popen(
        [sys.executable, *warm.FLAGS, "-c", code],
        cwd=cwd,
        env=env,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=start_new_session,
    )


def start_program(words: list, cwd, env: dict, start_new_session=False) -> warm.Process:
    """A Python process that runs `words`, a file or `-m` and a module, and arguments for it."""
    module = words[0] == "-m"
    program, *arguments = map(str, words[module:])
    place = str(cwd) if module else os.path.dirname(program)
    run = f"run_module({program!r}, alter_sys=True," if module else f"run_path({program!r},"
    return start_python(
        f"import sys; sys.argv[:] = {[program, *arguments]}; sys.path[0] = {place!r}\n"
        f"import runpy; runpy.{run} run_name='__main__')  # torch",
        cwd,
        env,
        start_new_session,
    )


def ended(process: warm.Process, timeout: float = 300) -> subprocess.CompletedProcess:
    """What a process has said and how it ended, once it has."""
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def keep_only(root: Path, *names: str) -> None:
    """Leave these operators alone to be built in a copy of the sources."""
    for room in ("ops", "kernels"):
        for file in (root / room).rglob("*.c*"):
            folder = file.parent.name
            belongs = file.name.split(".")[0].removesuffix("_cpu") if folder == room else folder
            if belongs not in names:
                file.unlink()


class Checkout:
    """A copy of the sources that a test may edit, with a build cache of its own."""

    def __init__(self, folder: Path, only: str | tuple[str, ...] = ()):
        self.root, self.cache = folder / "checkout", folder / "cache"
        self.root.mkdir(parents=True)
        for file in ("loader.py", "nn.py", "distributed.py"):
            shutil.copy(ROOT / file, self.root)
        for room in ROOMS:
            shutil.copytree(
                ROOT / room, self.root / room, ignore=shutil.ignore_patterns("__pycache__")
            )
        if compilers := os.environ.get("OCTET_COMPILERS"):
            with contextlib.suppress(FileNotFoundError):  # while a worker makes it
                shutil.copytree(f"{compilers}/../bytecode", self.root, dirs_exist_ok=True)
        if only:
            keep_only(self.root, *([only] if isinstance(only, str) else only))

    def environment(self, **changes) -> dict:
        """The environment of a run: neither GPUs nor an architecture list, unless a change says so."""
        cleared = ("TORCH_CUDA_ARCH_LIST", "LOADER_BUILD", "LOADER_NATIVE", "PYTHONPATH")
        env = {k: v for k, v in os.environ.items() if k not in cleared}
        env |= {"LOADER_CACHE_DIR": str(self.cache), "CUDA_VISIBLE_DEVICES": ""}
        env["LOADER_BUILD"] = "eager"
        if compilers := os.environ.get("OCTET_COMPILERS"):
            env["PATH"] = f"{compilers}/bin:{env['PATH']}"
            if "TORCH_CUDA_ARCH_LIST" in changes and os.path.exists(f"{compilers}/cuda/nvcc"):
                env["PYTORCH_NVCC"] = f"{compilers}/cuda/nvcc"
                env |= compiler.for_no_gpu() if "CUDA_VISIBLE_DEVICES" not in changes else {}
        for name, value in changes.items():
            env.pop(name, None) if value is None else env.update({name: str(value)})
        return env

    def start(self, code: str, start_new_session=False, fresh=False, **changes) -> warm.Process:
        """A Python process in the checkout, not waited for; see `start_python`."""
        return start_python(code, self.root, self.environment(**changes), start_new_session, fresh)

    def run(self, code: str, **changes) -> subprocess.CompletedProcess:
        """Run Python code in the checkout to its end."""
        return ended(self.start(code, **changes))

    def command(self, *arguments: str, **changes) -> subprocess.CompletedProcess:
        """Run `python -m loader ...` in the checkout."""
        env = self.environment(**{"LOADER_BUILD": None, **changes})
        return ended(start_program(["-m", "loader", *arguments], self.root, env))

    def entries(self) -> list[str]:
        """Names of the store's entries."""
        store = self.cache / "store"
        return sorted(p.name for p in store.iterdir() if p.name[0] != ".") if store.exists() else []


@pytest.fixture
def counting(tmp_path):
    """A function that gives a checkout a compiler which notes each source, and can be made slow."""

    def prepare(checkout: Checkout) -> Checkout:
        log, wrapper = checkout.root.parent / "compiled", checkout.root.parent / "counting-c++"
        wrapper.write_text(
            '#!/bin/sh\nfor a; do case "$a" in *.cpp) echo "$a" >> '
            f'"{log}"; sleep "${{SLOW:-0}}";; esac; done\nexec c++ "$@"\n'
        )
        wrapper.chmod(0o755)
        checkout.compiled = lambda: len(log.read_text().splitlines()) if log.exists() else 0
        start = checkout.start
        checkout.start = lambda code, **changes: start(code, **{"CXX": wrapper, **changes})
        return checkout

    return prepare


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose one operator is `square`, with an empty cache."""
    return Checkout(tmp_path, only="square")


@pytest.fixture(scope="session")
def store_of_square(tmp_path_factory):
    """A store with a build of `square` for the CPU, for tests to which its making is nothing."""
    checkout = Checkout(tmp_path_factory.mktemp("square"), only="square")
    done = checkout.run("import loader; loader.build()")
    assert done.returncode == 0, done.stderr
    return checkout.cache / "store"


@pytest.fixture
def built(checkout, store_of_square):
    """Has the store of `checkout` hold a build of `square` from the beginning."""
    shutil.copytree(store_of_square, checkout.cache / "store")
    return checkout


@pytest.fixture(scope="session")
def gpus():
    """Two ranks with a GPU each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    found = ranks.Ranks(2, "nccl")
    yield found
    found.close()


class Captured:
    """Stands for a workshop and takes down what it is told to compile."""

    ended = False

    def __init__(self, folder):
        self.folder, self.jobs = folder, []

    def compile(self, jobs):
        from loader.jit.build.workshop import CompileError

        self.jobs += jobs
        raise CompileError("not compiled")

    def link(self, command, name):
        self.linked = command
