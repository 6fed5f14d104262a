"""How something is built: who builds and who waits, the worker, its progress.

Imports `cache`, `machine` and `errors`.
"""
