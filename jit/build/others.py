"""A process that has no compiler waits for one that has: ranks of a cluster on one cache."""

import contextlib
import os
from pathlib import Path

from ..cache.lock import FileLock

PATIENCE = 60.0  # seconds that nobody builds what a rank without a compiler waits for
_RANKS = "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"  # torchrun's, Slurm's, Open MPI's


def expected() -> bool:
    """True if this process is one of several ranks, of which another may build."""
    return any(os.environ.get(name, "1") not in ("", "0", "1") for name in _RANKS)


def holder(work: Path, folder: str) -> dict | None:
    """Return what the builder of a unit noted, whatever its compilers; None where nobody builds."""
    for path in work.glob(f"{folder}-*.lock"):
        lock = FileLock(path)
        with contextlib.closing(lock):
            if lock.is_held():
                return lock.read() or {"pid": "?"}
    return None
