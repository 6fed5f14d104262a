"""Candidates that try to be accepted, or to do harm: what each is, and which checks may refuse it.

Each is KernelBench's form against `REFERENCE`, or against `COPY` where it is said so. `{victim}` is
a file of the judge's user, `{reference}` the reference's, `{pid}` a process of theirs.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

REFERENCE = """
import torch


class Model(torch.nn.Module):
    def forward(self, x, y):
        return torch.relu(x) * y.sum(-1, keepdim=True)


def get_inputs():
    return [torch.rand(24, 40), torch.rand(24, 40)]


def get_init_inputs():
    return []
"""

COPY = REFERENCE.replace("torch.relu(x) * y.sum(-1, keepdim=True)", "x.clone()")

HEAD = "import ctypes, gc, os, signal, socket, sys, threading, time\nimport torch\n"
RIGHT = "torch.relu(x) * y.sum(-1, keepdim=True)"


class Hostile(NamedTuple):
    """One candidate; `failed` has the checks that may refuse it, none where it does no harm."""

    code: str
    failed: tuple[str, ...] = ()
    says: str = ""  # what the text of that check has in it
    copy: bool = False


def module(body: str, before: str = "") -> str:
    """A candidate whose forward(self, x, y) is this, after some code of the file's own."""
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    kind = "class ModelNew(torch.nn.Module):\n    def forward(self, x, y):\n"
    return f"{HEAD}{before}\n\n{kind}{lines}\n"


def blocked(attempt: str) -> str:
    """A candidate that is right, and raises what its attempt does."""
    return module(f"{attempt}\nreturn {RIGHT}")


HOSTILE = {
    # Harm to the machine or the judge.
    "fork_bomb": Hostile(module("while True: os.fork()"), ("runs",)),
    "thread_bomb": Hostile(
        module("while True: threading.Thread(target=time.sleep, args=(60,)).start()"), ("runs",)
    ),
    "endless_loop": Hostile(module("while True: pass"), ("runs",), "no answer"),
    "endless_import": Hostile(module("pass", "while True: pass"), ("runs",), "no answer"),
    "stops_itself": Hostile(module("os.kill(os.getpid(), signal.SIGSTOP)"), ("runs",), "no answer"),
    "segfault": Hostile(module("ctypes.string_at(8)"), ("runs", "bounds"), "SIGSEGV"),
    "abort": Hostile(module("os.abort()"), ("runs",), "SIGABRT"),
    "kills_itself": Hostile(module("os.kill(os.getpid(), 9)"), ("runs",), "SIGKILL"),
    "exit_at_once": Hostile(module("os._exit(0)"), ("runs",), "exit status 0"),
    "exit_on_import": Hostile(module("pass", "sys.exit(0)"), ("loads",), "sys.exit"),
    "exit_with_atexit": Hostile(
        module("import atexit\natexit.register(print, 'accepted')\nsys.exit(0)"), ("runs",), "exit"
    ),
    "memory_bomb": Hostile(
        module("keep = []\nwhile True: keep.append(torch.ones(1 << 24))"), ("runs",)
    ),
    "shared_memory_bomb": Hostile(
        module(
            "while True:\n    file = os.memfd_create('x')\n    os.posix_fallocate(file, 0, 1 << 26)"
        ),
        ("runs",),
        "PermissionError",
    ),
    "anonymous_memory_bomb": Hostile(
        module(
            "import mmap\nkeep = []\nwhile True:\n    keep.append(mmap.mmap(-1, 1 << 26))\n"
            "    keep[-1].write(bytes(1 << 26))"
        ),
        ("runs",),
        "memory",
    ),
    "disk_bomb": Hostile(
        module("with open('big', 'wb') as f:\n    while True: f.write(bytes(1 << 24))"), ("runs",)
    ),
    "output_flood": Hostile(module("while True: print('x' * (1 << 20))"), ("runs",), "printed"),
    "writes_a_file": Hostile(blocked("open({victim!r}, 'w').write('mine')"), ("runs",)),
    "removes_a_file": Hostile(blocked("os.remove({victim!r})"), ("runs",)),
    "replaces_torch": Hostile(blocked("open(torch.__file__, 'a')"), ("runs",)),
    "reads_a_file": Hostile(blocked("open({victim!r}).read()"), ("runs",)),
    "network": Hostile(
        blocked("socket.create_connection(('127.0.0.1', 80), 1)"), ("runs",), "Permission"
    ),
    "signals_the_parent": Hostile(blocked("os.kill({pid}, 9)"), ("runs",)),
    "signals_everybody": Hostile(
        blocked(
            "try: os.kill(os.getppid(), 9)\nexcept OSError: pass\n"
            "try: os.kill(-1, 9)\nexcept OSError: pass"
        ),
        (),
    ),
    "ptraces_the_parent": Hostile(
        blocked(
            "assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0, 'ptrace is refused'"
        ),
        ("runs",),
        "ptrace is refused",
    ),
    "reads_the_parent": Hostile(blocked("open(f'/proc/{{os.getppid()}}/mem', 'rb')"), ("runs",)),
    "unshares": Hostile(
        blocked("assert ctypes.CDLL(None).unshare(0x10000000) == 0, 'refused'"), ("runs",)
    ),
    "mounts": Hostile(
        blocked("assert ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, 0) == 0, 'refused'"),
        ("runs",),
    ),
    # Forged results.
    "prints_a_verdict": Hostile(
        module('print(\'{{"verdict": "accepted"}}\')\nreturn torch.zeros_like(x)'),
        ("values",),
    ),
    "writes_to_descriptors": Hostile(
        module(
            "for fd in range(64):\n"
            '    try: os.write(fd, b\'{{"verdict": "accepted", "failed": []}}\')\n'
            "    except OSError: pass\n"
            "return torch.zeros_like(x)"
        ),
        ("runs", "results", "values"),
    ),
    "writes_garbage_to_descriptors": Hostile(
        module(
            "for fd in range(64):\n    try: os.write(fd, b'[' * 5000)\n    except OSError: pass"
        ),
        ("runs",),
    ),
    "answers_in_advance": Hostile(
        module(
            "import json\nself.n = getattr(self, 'n', 0) + 1\n"
            "for fd in range(3, 64):\n"
            "    try: socket.socket(fileno=os.dup(fd)).send(b'{{}}')\n    except OSError: pass\n"
            f"return {RIGHT}"
        ),
        ("runs", "results", "values", "timed_values"),
    ),
    "closes_descriptors": Hostile(module("os.closerange(0, 64)"), ("runs", "results")),
    "dup2_over_descriptors": Hostile(
        module("null = os.open('/dev/null', 2)\nfor fd in range(64): os.dup2(null, fd)"),
        ("runs", "results"),
    ),
    "thread_writes_to_descriptors": Hostile(
        module(
            "return torch.zeros_like(x)",
            "def fill():\n    while True:\n        for fd in range(3, 64):\n"
            "            try: os.write(fd, b'{{}}')\n            except OSError: pass\n"
            "threading.Thread(target=fill, daemon=True).start()",
        ),
        ("runs", "results", "values"),
    ),
    "replaces_the_judges_code": Hostile(
        module(
            "return torch.zeros_like(x)",
            "from loader.jit.judge import compare, tamper, witness\n"
            "compare.differs = lambda *a: None\ntamper.changed = lambda known: []\n"
            "witness.Witness._aliases = lambda *a: []\n",
        ),
        ("values",),
    ),
    "keeps_its_processes": Hostile(
        blocked("pass").replace(
            "\n\nclass",
            "from loader.jit.judge import seccomp\nseccomp.forbid_processes = lambda: None\n\n\nclass",
            1,
        ),
        ("tampering",),
    ),
    "patches_json": Hostile(
        module(
            "return torch.zeros_like(x)",
            "import json\nold = json.dumps\n"
            "json.dumps = lambda m, **k: old({{**m, 'patched': [], 'outside': ''}}, **k)",
        ),
        ("values", "tampering"),
    ),
    "overwrites_libc": Hostile(
        module(
            "return " + RIGHT,
            "libc = ctypes.CDLL(None)\n"
            "place = ctypes.cast(libc.clock_gettime, ctypes.c_void_p).value\n"
            "assert libc.mprotect(ctypes.c_void_p(place & ~4095), 8192, 7) == 0\n"
            "ctypes.memmove(place, bytes.fromhex('31c0c3'), 3)",
        ),
    ),
    "traps_system_calls": Hostile(
        module(
            "return " + RIGHT,
            "import struct\n"
            "code = struct.pack('HBBI' * 4, 0x20, 0, 0, 0, 0x15, 0, 1, 46, 6, 0, 0, 0x30000,"
            " 6, 0, 0, 0x7FFF0000)\n"
            "text = ctypes.create_string_buffer(code, len(code))\n"
            "program = ctypes.create_string_buffer(struct.pack('HxxxxxxP', 4, "
            "ctypes.addressof(text)))\n"
            "ctypes.CDLL(None).prctl(22, 2, program, 0, 0)",
        ),
        ("runs",),
    ),
    # The reference and what it gives.
    "reads_the_reference": Hostile(module("pass", "text = open({reference!r}).read()"), ("loads",)),
    "imports_the_reference": Hostile(
        module(
            "return Model()(x, y)",
            "sys.path.insert(0, os.path.dirname({reference!r}))\nfrom ref import Model",
        ),
        ("loads",),
    ),
    "finds_the_reference_in_memory": Hostile(
        module(
            "for thing in gc.get_objects():\n"
            "    if isinstance(thing, type) and thing.__name__ == 'Model': return thing()(x, y)\n"
            "raise LookupError('no Model')"
        ),
        ("runs",),
        "no Model",
    ),
    "finds_the_results_in_memory": Hostile(
        module(
            "for thing in gc.get_objects():\n"
            "    if type(thing) is torch.Tensor and thing.shape == x.shape:\n"
            "        if thing is not x and thing is not y: return thing.clone()\n"
            "return torch.zeros_like(x)"
        ),
        ("values",),
    ),
    "fills_all_with_nan": Hostile(
        module(
            "for thing in gc.get_objects():\n"
            "    if type(thing) is torch.Tensor and thing.is_floating_point(): thing.fill_(torch.nan)\n"
            "return torch.full((24, 40), torch.nan)"
        ),
        ("inputs_unchanged", "values"),
    ),
    "finds_frames": Hostile(
        module(
            "frame = sys._getframe()\nwhile frame:\n"
            "    for value in list(frame.f_locals.values()):\n"
            "        if type(value) is dict and 'expected' in value: return value['expected']\n"
            "    frame = frame.f_back\nreturn torch.zeros_like(x)"
        ),
        ("values",),
    ),
    # Wrong, and looks right.
    "all_nan": Hostile(module("return torch.full_like(x, torch.nan)"), ("values",)),
    "all_infinite": Hostile(module("return torch.full_like(x, torch.inf)"), ("values",)),
    "unwritten": Hostile(module("return torch.empty_like(x)"), ("written", "values")),
    "last_row_unwritten": Hostile(
        module(f"out = torch.empty(x.shape)\nout[:-1] = ({RIGHT})[:-1]\nreturn out"),
        ("written", "values"),
    ),
    "for_positive_numbers": Hostile(module("return x * y.sum(-1, keepdim=True)"), ("values",)),
    "in_bfloat16_from_the_second_call_on": Hostile(
        module(
            "self.n = getattr(self, 'n', 0) + 1\n"
            "if self.n > 1: x, y = x.bfloat16(), y.bfloat16()\n"
            f"return ({RIGHT}).float()"
        ),
        ("values",),
    ),
    "in_bfloat16": Hostile(
        module("x, y = x.bfloat16(), y.bfloat16()\nreturn (" + RIGHT + ").float()"), ("values",)
    ),
    "other_dtype": Hostile(module(f"return ({RIGHT}).double()"), ("results",), "float64"),
    "other_shape": Hostile(module(f"return ({RIGHT})[:1]"), ("results",), "shape"),
    "broadcasts": Hostile(module(f"return ({RIGHT})[None]"), ("results",), "shape"),
    "no_tensor": Hostile(module("return object()"), ("runs",), "neither a tensor"),
    "evil_pickle": Hostile(
        module("class Evil:\n    def __reduce__(self): return os.system, ('true',)\nreturn Evil()"),
        ("runs",),
    ),
    "deep_result": Hostile(
        module("out = []\nfor _ in range(3000): out = [out]\nreturn out"), ("runs", "results")
    ),
    "lazy_subclass": Hostile(
        module(
            "out = torch.empty_like(x).as_subclass(Lazy)\nout.given = x, y\nreturn out",
            "class Lazy(torch.Tensor):\n    @classmethod\n"
            "    def __torch_function__(cls, f, types, args=(), kwargs=None):\n"
            "        with torch._C.DisableTorchFunctionSubclass():\n"
            "            me = args[0]\n"
            "            if hasattr(me, 'given'):\n"
            "                x, y = me.given\n"
            f"                me.as_subclass(torch.Tensor).copy_({RIGHT})\n"
            "            return f(*args, **(kwargs or {{}}))",
        ),
        ("results",),
    ),
    "fills_later": Hostile(
        module(
            "out = torch.full_like(x, torch.nan)\n"
            f"threading.Timer(0.3, lambda: out.copy_({RIGHT})).start()\nreturn out"
        ),
        ("values",),
    ),
    "zeroes_its_arguments": Hostile(
        module("x.zero_(), y.zero_()\nreturn torch.zeros_like(x)"), ("inputs_unchanged",)
    ),
    "writes_into_an_argument": Hostile(
        module(f"out = {RIGHT}\nx[3, 3] += 1\nreturn out"), ("inputs_unchanged",)
    ),
    "returns_its_argument": Hostile(module("return x"), ("aliasing",), copy=True),
    "returns_a_view": Hostile(module("return x.t().t()"), ("aliasing",), copy=True),
    "one_buffer_for_all_results": Hostile(
        module(
            "self.out = getattr(self, 'out', None)\n"
            f"if self.out is None or self.out.shape != x.shape: self.out = {RIGHT}\n"
            f"return self.out.copy_({RIGHT})"
        ),
        ("aliasing",),
    ),
    "caches_by_pointer": Hostile(
        module(
            "key = x.data_ptr(), y.data_ptr()\nself.known = getattr(self, 'known', {{}})\n"
            f"if key not in self.known: self.known[key] = {RIGHT}\nreturn self.known[key].clone()"
        ),
        ("caching",),
    ),
    "caches_by_shape": Hostile(
        module(
            "self.known = getattr(self, 'known', {{}})\n"
            f"if x.shape not in self.known: self.known[x.shape] = {RIGHT}\n"
            "return self.known[x.shape].clone()"
        ),
        ("caching",),
    ),
    "caches_by_first_numbers": Hostile(
        module(
            "key = x[0, :8].sum().item()\nself.known = getattr(self, 'known', {{}})\n"
            f"if key not in self.known: self.known[key] = {RIGHT}\nreturn self.known[key].clone()"
        ),
        ("caching",),
    ),
    "right_a_few_times": Hostile(
        module(
            "self.n = getattr(self, 'n', 0) + 1\n"
            f"return {RIGHT} if self.n < 20 else torch.zeros_like(x)"
        ),
        ("timed_values",),
    ),
    "slow_at_first": Hostile(
        module(
            f"self.n = getattr(self, 'n', 0) + 1\nif self.n < 4: time.sleep(0.1)\nreturn {RIGHT}"
        )
    ),
    "writes_past_the_end": Hostile(
        module(f"out = {RIGHT}\nctypes.memset(out.data_ptr() + 4 * out.numel(), 1, 8)\nreturn out"),
        ("bounds",),
    ),
    "writes_before_the_beginning": Hostile(
        module(f"out = {RIGHT}\nctypes.memset(out.data_ptr() - 8, 1, 8)\nreturn out"), ("bounds",)
    ),
    "writes_before_an_argument": Hostile(
        module(f"out = {RIGHT}\nctypes.memset(x.data_ptr() - 4, 1, 4)\nreturn out"), ("bounds",)
    ),
    "reads_past_an_argument": Hostile(
        module(f"ctypes.string_at(x.data_ptr() + 4 * x.numel(), 64)\nreturn {RIGHT}"), ("bounds",)
    ),
    # Replaced functions.
    "patches_time": Hostile(
        module("return " + RIGHT, "time.perf_counter = lambda: 0.0"), ("tampering",)
    ),
    "patches_allclose": Hostile(
        module("return torch.zeros_like(x)", "torch.allclose = lambda *a, **k: True"),
        ("tampering",),
    ),
    "patches_synchronize": Hostile(
        module("return " + RIGHT, "torch.cuda.synchronize = lambda *a: None"), ("tampering",)
    ),
    "patches_events": Hostile(
        module("return " + RIGHT, "torch.cuda.Event.elapsed_time = lambda *a: 0.001"),
        ("tampering",),
    ),
    "patches_builtins": Hostile(
        module("return " + RIGHT, "import builtins\nbuiltins.abs = lambda x: 0"), ("tampering",)
    ),
    "patches_equality": Hostile(
        module("return torch.zeros_like(x)", "torch.Tensor.equal = lambda *a: True"),
        ("tampering",),
    ),
    "patches_and_restores": Hostile(
        module(
            "old, time.perf_counter = time.perf_counter, lambda: 0.0\ntry:\n"
            f"    return {RIGHT}\nfinally:\n    time.perf_counter = old"
        )
    ),
}

SLOW = {"endless_loop", "endless_import", "stops_itself"}  # these take as long as they may


def written(folder: Path, names: Iterable[str], pid: int = 1) -> tuple[list[Path], Path]:
    """Write candidates, all against one reference, and that; their files and the reference's.

    `victim` in the folder is what they are to spoil, `pid` whom they are to kill.
    """
    victim = folder / "victim"
    victim.write_text("theirs")
    names, paths = [*names], []
    copy = HOSTILE[names[0]].copy
    place = folder / ("copy" if copy else "usual")
    place.mkdir(exist_ok=True)
    reference = place / "ref.py"
    reference.write_text(COPY if copy else REFERENCE)
    for name in names:
        text = HOSTILE[name].code.replace("{{", "{").replace("}}", "}")
        for word, value in {"victim": str(victim), "reference": str(reference)}.items():
            text = text.replace("{" + word + "!r}", repr(value))
        paths.append(folder / f"{name}.py")
        paths[-1].write_text(text.replace("{pid}", str(pid)))
    return paths, reference
