"""`loader.source_module`: kernels from a string, on the GPU and on the CPU.

Doors: `module`.

Imports `build`, `cache`, `machine` and `errors`.
"""
