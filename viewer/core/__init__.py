"""What is shown and how it is computed, without a window: files, cameras, operators, pictures.

Doors: `sources` (files), `flat` and `planes` (cameras), `tables`, `operators`, `scene` (pictures),
`edits` (what became of an edit).

Imports `loader` alone, and no Qt.
"""
