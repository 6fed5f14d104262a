"""Operators: found, loaded at first use, and the frame that `ops/X.py` stands on.

Imports `build`, `cache`, `machine` and `errors`; nothing of `extension`, `source` or `live`.
"""
