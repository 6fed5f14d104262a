"""How something is built: who builds and who waits, what runs the compilers, progress.

Doors: `builder` (what the store lacks), `worker` (the process that compiles), `receipt` (what was
done, in milliseconds), `compile_commands` (for editors).

Imports `cache`, `machine` and `errors`.
"""
