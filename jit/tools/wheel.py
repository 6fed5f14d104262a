"""`python -m loader wheel`: a wheel with the operators' builds inside, which needs no compiler.

There is a build for every CPU of this kind, with loops for those with AVX2 and with AVX-512 in it;
with CUDA for the GPUs named and, by PTX of the last, for newer ones, and one without CUDA for a
torch that has none, or another one's. They lie in the package, in the form of a cache, and are
found by the same keys. hatchling packs; auditwheel says on which Linux it runs.
"""

import contextlib
import copy
import json
import os
import shutil
import signal
import subprocess
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..build.progress import say
from ..build.steps import Steps
from ..cache.key import key as key_of
from ..cache.key import manifest
from ..cache.store import MANIFEST
from ..errors.table import Table, bytes_text
from ..machine import child, settings, told
from ..machine.sources import Sources, unit_of
from ..machine.toolchain import FLAGS, LINK_FLAGS

# What must not get into a build for others.
_OWN_FLAGS = (*FLAGS, *LINK_FLAGS, "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
# torch brings these, or what it needs brings them.
_TORCHS = frozenset({"libtorch*.so", "libc10*.so", "libcudart.so.*"})
_PLAIN = 30.0  # seconds between lines on how far the builds are, where there is no terminal
# What ends an interrupted build, and the seconds that it gets for that.
_ENDING = {0: 2, signal.SIGINT: 60, signal.SIGKILL: None}


def make(root: Path, out: Path, architectures: Sequence[str]) -> Path:
    """Return the wheel that is made in the folder `out`, of loader's checkout `root`.

    Builds go to the cache as ever, so an interrupted call goes on where it was.
    Raises: RuntimeError with what is missing to make one, or what failed.
    """
    if not (root / "pyproject.toml").exists():
        raise RuntimeError("wheel: wheels are made in loader's checkout; this copy is installed")
    try:
        import auditwheel.wheel_abi  # noqa: F401
        import hatchling.builders.wheel  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"wheel: {error}; pip install hatchling auditwheel") from None
    targets = _targets(architectures)
    steps = len(targets) + 1
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch, settings.PREBUILT, "store")
        for number, (name, wanted) in enumerate(targets.items(), 1):
            say(f"wheel, step {number} of {steps}: builds for {name}")
            _build(store, wanted)
        say(f"wheel, step {steps} of {steps}: packing")
        draft = _pack(root, store, Path(scratch), f"linux_{os.uname().machine}")
        out.mkdir(parents=True, exist_ok=True)
        return _pack(root, store, out, _platform(draft))


def contents(wheel: Path) -> Table:
    """Return what is in a wheel, folder by folder."""
    with zipfile.ZipFile(wheel) as archive:
        files = [info for info in archive.infolist() if not info.is_dir()]
    size = sum(info.file_size for info in files)
    title = f"{wheel}: {bytes_text(wheel.stat().st_size)}, {bytes_text(size)} unpacked"
    table = Table(title, ("folder", "files", "size"), ("files", "size"))
    folders: dict[str, list[int]] = {}
    for info in files:
        parts = info.filename.split("/")
        deep = 4 if settings.PREBUILT in parts else 2
        folders.setdefault("/".join(parts[:-1][:deep]), []).append(info.file_size)
    for folder, sizes in sorted(folders.items()):
        table.rows.append((folder, str(len(sizes)), bytes_text(sum(sizes))))
    return table


def _targets(architectures: Sequence[str]) -> dict[str, str]:
    """Return the GPUs to build for by what people call it, in the form of TORCH_CUDA_ARCH_LIST."""
    targets = {"any CPU": ""}
    if architectures:
        *others, last = architectures
        ptx = f"{last.removesuffix('+PTX')}+PTX"
        targets[f"any CPU and GPUs {' '.join(architectures)}"] = ";".join([*others, ptx])
    return targets


def _build(store: Path, architectures: str) -> None:
    """Have another process build all operators, and copy them into `store`."""
    kept = {name: text for name, text in os.environ.items() if name not in _OWN_FLAGS}
    chosen = {"LOADER_NATIVE": "0", "LOADER_BUILD": "lazy"}
    chosen |= {"TORCH_CUDA_ARCH_LIST": architectures, "CUDA_VISIBLE_DEVICES": ""}
    command = child.command("tools.wheel.build_into", str(store), architectures)
    process = subprocess.Popen(command, env=kept | chosen)
    try:
        status = process.wait()
    except KeyboardInterrupt:  # which a terminal sends to both
        for number, patience in _ENDING.items():
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
                break
        raise
    if status:
        raise RuntimeError("wheel: the builds failed, as said above; none was made")


def build_into(store: str, architectures: str) -> None:
    """Do what `_build` has another process do.

    A build in the cache that would serve here, for more GPUs say, will not do: the keys are those
    of these flags exactly.
    """
    import loader

    Steps.plain = _PLAIN
    session = loader._session
    tools = session.toolchain
    if architectures and not (tools.nvcc and tools.architectures):
        raise SystemExit("loader: --arch needs nvcc; `python -m loader doctor` says how to get it")
    sources = Sources(session.root)
    keys = {
        library: key_of(manifest(unit, tools, sources) | {"unit": library})
        for unit in session.units.values()
        for library in unit.libraries
    }
    wanted = {n: "a wheel's" for n, key in keys.items() if not session.store.verified(n, key)}
    try:
        if batch := session.begin([*dict.fromkeys(map(unit_of, wanted))], wanted):
            batch.wait()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if errors := [session.errors[name] for name in wanted if name in session.errors]:
        told.tell_each(errors)
        raise SystemExit(1)
    for name, key in keys.items():
        library = session.store.verified(name, key)
        if not library:
            raise SystemExit(
                f"loader: {name}: its sources changed while they were built; try again"
            )
        _copy(library.parent, Path(store))


def _copy(entry: Path, store: Path) -> None:
    """Copy an entry of the cache without what it says of this machine's folders."""
    shutil.copytree(entry, store / entry.name, ignore=lambda *_: {MANIFEST})
    recorded = json.loads((entry / MANIFEST).read_text())
    del recorded["root"]
    recorded["why"] = ["it came with the wheel"]
    (store / entry.name / MANIFEST).write_text(json.dumps(recorded, indent=1))
    for library in (store / entry.name).glob("*.so"):
        library.chmod(0o644)


def _pack(root: Path, store: Path, out: Path, platform: str) -> Path:
    """Make the wheel of a checkout with `store` inside, for a platform such as linux_x86_64.

    Its version says which CUDA it is for, as torch's own do: `+cu13`, `+cpu`.
    """
    from hatchling.builders.wheel import WheelBuilder

    class Builder(WheelBuilder):
        def get_default_build_data(self) -> dict[str, Any]:
            return super().get_default_build_data() | {
                "pure_python": False,
                "tag": f"py3-none-{platform}",
                "force_include": {str(store): f"loader/{settings.PREBUILT}/store"},
            }

    config = copy.deepcopy(WheelBuilder(str(root)).metadata.config)
    config["project"]["version"] += f"+{_label(store)}"
    (wheel,) = Builder(str(root), config=config).build(directory=str(out), versions=["standard"])
    return Path(wheel)


def _label(store: Path) -> str:
    found = [json.loads(file.read_text()) for file in store.glob(f"*/{MANIFEST}")]
    runtimes = {entry["inputs"]["toolchain"].get("cuda_runtime", "") for entry in found} - {""}
    return f"cu{max(runtimes)}" if runtimes else "cpu"


def _platform(wheel: Path) -> str:
    """Return the oldest platform with what a wheel's libraries need, as manylinux_2_34_x86_64.

    It goes by the versions of the symbols of glibc and libstdc++. RuntimeError where a library
    needs another one that neither Linux nor torch has.
    """
    from auditwheel.wheel_abi import analyze_wheel_abi

    found = analyze_wheel_abi(
        None, None, wheel, _TORCHS, disable_isa_ext_check=False, allow_graft=False
    )
    if found.overall_policy == found.policies.linux:
        needed = {lib for refs in found.external_refs.values() for lib in refs.libs}
        raise RuntimeError(
            f"wheel: no platform of manylinux has what its libraries need: {', '.join(needed)}"
        )
    return found.overall_policy.name
