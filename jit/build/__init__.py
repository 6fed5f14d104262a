"""How something is built: who builds and who waits, what runs the compilers, progress.

Doors: `engine` (from a recipe to an artifact in the store), `batch` (builds that were started
together), `locks` (of work folders), `flags` (as torch gives them to its
compilers), `workshop` (a work folder: compilers side by side, finished objects kept), `progress`,
`slots` (as many compilers as cores), `receipt` (what was done, in milliseconds),
`compile_commands` (for editors).

Imports `cache`, `machine` and `errors`.
"""
