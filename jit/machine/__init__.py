"""The machine and the checkout, looked at without running a compiler.

Doors: `settings` (the environment variables that are ours), `sources` (what a unit is made of),
`reads` (what the words of a command have read), `toolchain` (compilers, flags, torch), `levels` (of
CPUs), `gpus`, `files` (written in one step), `forks` (locks that a forked child finds open),
`child` (starting programs, a Python too), `timing` (how long a call takes), `told` (errors as they
are printed).

Imports `errors`.
"""
