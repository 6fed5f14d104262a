"""Operators: found in a folder, built, loaded at first use, and what `ops/X.py` stands on.

Doors: `session` (the operators of one folder), `frame`, `elementwise` and `shapes` (for
`ops/X.py`), `library` (`loader.Library`), `offered` (names that `ops/` adds to loader's), `explain`,
`new`.

Imports `build`, `cache`, `machine` and `errors`.
"""
