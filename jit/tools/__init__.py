"""The command line, `python -m loader`: doctor, profile, sanitize, the cache's care, benchmarks.

Doors: `cli` (the command line), `doctor` (`loader.doctor`).

Imports every other room; none imports it.
"""
