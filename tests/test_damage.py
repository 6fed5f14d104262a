"""Whatever becomes of the cache's files, no damaged one is loaded."""

import os
from pathlib import Path

import pytest
from conftest import ended, start_program


@pytest.mark.parametrize(("kind", "share"), [("operator", 0.1), ("extension", 0), ("kernel", 0)])
def test_every_file_of_the_cache_may_be_damaged_in_ten_ways(kind, share, tmp_path):
    """Each file, all at once, and a part of the pairs; `python tests/damage.py` runs all pairs."""
    words = [Path(__file__).with_name("damage.py"), "--kind", kind, "--share", share]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = ended(start_program(words, Path.cwd(), environment), timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[1]) >= 30
