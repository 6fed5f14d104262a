"""Verdicts that the workers of a session share: the first that asks has all candidates judged."""

import json
from collections.abc import Callable

import filelock
from conftest import shared_folder

from loader.jit.judge.verdict import Verdict


def shared(tmp_path_factory, config, name: str, judge: Callable[[], dict]) -> dict:
    """What `judge` returns, plain data of which `verdicts` are a dict of Verdicts."""
    file = shared_folder(tmp_path_factory, config) / f"{name}.json"
    with filelock.FileLock(f"{file}.lock"):
        if not file.exists():
            found = judge()
            data = {n: v.data for n, v in found["verdicts"].items()}
            file.write_text(json.dumps({**found, "verdicts": data}))
    found = json.loads(file.read_text())
    return {**found, "verdicts": {n: Verdict(v) for n, v in found["verdicts"].items()}}
