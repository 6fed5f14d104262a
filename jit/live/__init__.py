"""Edits in a running process: found, built, tried in another process, put in place or refused.

Doors: `reload` (`loader.reload`, `loader.revert`), `watch`, `notebook` (`%load_ext loader`),
`swap`, and for `judge` `guard`, `rebuild` and `rounding`.

Imports `operators`, `source` and the rooms below them.
"""
