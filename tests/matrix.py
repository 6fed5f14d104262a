"""The suite on the CPU under several versions of torch: `make matrix VERSIONS="2.10 newest"`.

    python tests/matrix.py [--fast] 2.10 2.15 newest

Each version has an environment of its own, .matrix/VERSION, which is made once: that torch with
what it asks for, and all else as requirements.txt has it. A version's result is kept beside it, and
one that has run on these very sources does not run again, so whatever ended a run, the next goes on.
All run every operator on what the Python that runs this has built, without building.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).parent.parent
HERE = ROOT / ".matrix"
ROOMS = ("jit", "ops", "kernels", "include", "viewer", "tests", "examples")
TESTED = ("loader.py", *ROOMS, "pyproject.toml")

# What a new torch is likeliest to break, by file: the operators but for what takes long, and of
# `load_inline`, torch's own functions and edits what asks most of torch.
_LONG = "2_31 or more_pixels or compiles and not (Square or Trilinear)"
FAST = {f"test_{file.stem}.py": f"not ({_LONG})" for file in (ROOT / "ops").glob("*.cpp")} | {
    "test_accelerate_torch.py": "not compile",
    "test_schemas.py": "archive",
    "test_nn.py": f"not ({_LONG})",
    "test_dtensor.py": "transforms",
    "test_sharded.py": "at_random",
    "test_inline.py": "snippets or conversions or arguments or last_way or gil or module_works_on",
    "test_last_way.py": "",
    "test_accelerate_extensions.py": "each_argument or restored or signatures or names_and_places",
    "test_reload.py": "whoever_holds or wrong_results or python_side or other_arguments",
}


def environment(version: str) -> Path:
    """The Python of a version's environment, made or brought up to date where needed."""
    folder = HERE / version
    python, ready = folder / "bin/python", folder / "ready"
    requirements = (ROOT / "requirements.txt").read_text()
    if ready.exists() and ready.read_text() == requirements:
        return python
    print(f"torch {version}: making {folder}", flush=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    torch = f"torch=={version}" + ".*" * (version.count(".") < 2)
    subprocess.run([*pip, "install", "--quiet", torch, "setuptools>=70"], check=True)
    listed = subprocess.run([*pip, "list", "--format=json"], capture_output=True, check=True).stdout
    brought = {re.sub(r"[-_.]+", "-", row["name"]).lower() for row in json.loads(listed)}
    # NVIDIA's are of the pinned torch.
    others = [
        line
        for line in requirements.splitlines()
        if line.split("==")[0] not in brought and not line.startswith(("#", "nvidia-"))
    ]
    rest = folder / "rest.txt"
    rest.write_text("\n".join(others))
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "-r", rest], check=True)
    ready.write_text(requirements)
    return python


def newest() -> str:
    """The version of torch that pip gives today."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.search(r"\(([\d.]+)\)", said)[1]


def digest() -> str:
    """Of all that a result depends on."""
    found = hashlib.sha256()
    for room in TESTED:
        path = ROOT / room
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts and "out" not in file.parts:
                found.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return found.hexdigest()[:16]


def tests(python: Path, version: str, fast: bool, workers: int) -> dict:
    """Run the suite; counts, and what failed, with its message."""
    report = HERE / f"{version}.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-n", str(workers)]
    command += ["--dist", "worksteal", f"--junitxml={report}"]
    if fast:
        chosen = [f"{file} and ({which})" if which else file for file, which in FAST.items()]
        command += [*(f"tests/{file}" for file in FAST), "-k", " or ".join(chosen)]
    begun = time.time()
    subprocess.run(command, cwd=ROOT, env=on_the_cpu(), check=False)
    if not report.exists():
        sys.exit(f"torch {version}: pytest did not end")
    suite = next(xml.etree.ElementTree.parse(report).iter("testsuite"))
    count = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}::{case.get('name')} {bad.tag}: {bad.get('message')}"[:500]
        for case in suite.iter("testcase")
        for bad in (*case.iter("failure"), *case.iter("error"))
    ]
    bad = count["failures"] + count["errors"]
    passed = count["tests"] - bad - count["skipped"]
    minutes = round((time.time() - begun) / 60, 1)
    return {"passed": passed, "failed": failed, "skipped": count["skipped"], "minutes": minutes}


def on_the_cpu() -> dict[str, str]:
    """The environment of all that runs here: no GPU is seen, and nothing is compiled for one."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive"}
    env.pop("TORCH_CUDA_ARCH_LIST", None)
    return env


def is_served(python: Path) -> bool:
    """True if all operators are right as they were built by the Python that runs this."""
    env = on_the_cpu()
    subprocess.run([sys.executable, "-m", "loader", "build"], cwd=ROOT, env=env, check=True)
    command, env["LOADER_BUILD"] = [python, "tests/prebuilt.py"], "never"
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode == 0


def run(version: str, fast: bool, workers: int) -> dict:
    """The result of a version, kept or new."""
    python, file = environment(version), HERE / f"{version}{'-fast' * fast}.json"
    state = {"digest": digest(), "torch": version}
    try:
        kept = json.loads(file.read_text())
    except (OSError, ValueError):
        kept = {}
    if not state.items() <= kept.items():
        kept = state | {"served": is_served(python)} | tests(python, version, fast, workers)
        file.write_text(json.dumps(kept, indent=1))
    return kept


def main() -> None:
    """Run all versions asked for and print a table of the results; exit status 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="+", help="2.10, 2.15.1, newest")
    parser.add_argument(
        "--fast", action="store_true", help="what a new torch is likeliest to break"
    )
    usual = min(8, (os.cpu_count() or 1) + 1)
    parser.add_argument("--workers", type=int, default=usual, help="of pytest-xdist (%(default)s)")
    options = parser.parse_args()
    HERE.mkdir(exist_ok=True)
    names = [newest() if name == "newest" else name for name in options.versions]
    names = [n for n in dict.fromkeys(names) if not any(n.startswith(f"{m}.") for m in names)]
    found = [run(name, options.fast, options.workers) for name in names]
    print("| torch | passed | failed | skipped | minutes | served by one build |")
    print("|---|---|---|---|---|---|")
    for row in found:
        counts = row["passed"], len(row["failed"]), row["skipped"], row["minutes"], row["served"]
        print(f"| {row['torch']} | " + " | ".join(map(str, counts)) + " |")
    for row in found:
        for failure in row["failed"][:20]:  # what failed last says the least
            print(f"torch {row['torch']}: {failure}")
    sys.exit(any(row["failed"] or not row["served"] for row in found))


if __name__ == "__main__":
    main()
