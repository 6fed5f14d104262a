"""`loader.load` and `loader.load_inline`: extensions of the user's own, and torch's ways to them.

Doors: `load`, `torchs` (torch's own functions and BuildExtension on this engine).

Imports `build`, `cache`, `machine` and `errors`.
"""
