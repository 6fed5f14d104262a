"""Whatever becomes of the cache's files, no damaged one is loaded."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("kind", "share"), [("operator", 0.1), ("extension", 0), ("kernel", 0)])
def test_every_file_of_the_cache_may_be_damaged_in_ten_ways(kind, share):
    """Each file, all at once, and a part of the pairs; `python tests/damage.py` runs all pairs."""
    program = Path(__file__).with_name("damage.py")
    done = subprocess.run(
        [sys.executable, str(program), "--kind", kind, "--share", str(share)],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[1]) >= 30
