"""Operators: found in a folder, built, loaded at first use, and what `ops/X.py` stands on.

Doors: `session` (the operators of one folder), `frame` (for `ops/X.py`), `library`
(`loader.Library`), `accelerate` (`loader.accelerate_torch`), `explain`, `new`.

Imports `build`, `cache`, `machine` and `errors`.
"""
