"""A few dozen steps of the hostile run; `python tests/hostile.py --steps 300` does the whole."""

import hostile


def test_a_living_process_survives_a_hostile_user(tmp_path):
    result = hostile.outside(seed=18, steps=24, folder=tmp_path / "a folder with ä space")
    assert result["mistakes"] == []
