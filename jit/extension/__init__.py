"""`loader.load` and `loader.load_inline`: extensions of the user's own.

Imports `build`, `cache`, `machine` and `errors`.
"""
