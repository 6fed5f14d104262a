"""How something is built: who builds and who waits, what runs the compilers, progress.

Doors: `engine` (from a recipe to an artifact in the store), `batch` (several builds, behind or
waited for), `flags` (as torch gives them to its compilers), `workshop` (a work folder: compilers
side by side, finished objects kept), `slots` (as many compilers as cores), `steps` and `progress`
(what a person sees), `receipt` (what was done, in milliseconds), `compile_commands` (for editors).

Imports `cache`, `machine` and `errors`.
"""
