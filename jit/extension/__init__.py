"""`loader.load` and `loader.load_inline`: extensions of the user's own.

Doors: `load`.

Imports `build`, `cache`, `machine` and `errors`.
"""
