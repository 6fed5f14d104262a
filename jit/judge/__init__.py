"""A judge for kernels that nobody trusts: right, safe and fast, found out where they cannot reach.

Doors: `judge` (`loader.judge`, and what `python -m loader judge` calls).

Imports `live`, `extension`, `operators` and the rooms below them.
"""
