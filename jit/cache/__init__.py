"""The builds that there are, and the keys they lie under.

Doors: `key` (what a build depends on), `store` (whole entries or none, verified before use),
`lock` (one builder, the others wait), `index` (a warm import), `prune` (making room), `explain`
(what changed between two builds).

Imports `machine` and `errors`.
"""
