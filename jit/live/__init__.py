"""Edits in a running process: found, built, tried in another process, put in place or refused.

Doors: `reload` (`loader.reload`, `loader.revert`), `watch`, `notebook` (`%load_ext loader`),
`swap`, `guard` and `rebuild` (for `judge`).

Imports `operators`, `source` and the rooms below them.
"""
