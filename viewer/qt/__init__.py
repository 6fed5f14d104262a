"""The window: needs PySide6. What it shows comes from `core`.

Doors: `app` (`python -m loader view`), `window`, `settings`.

Imports `core` and `loader`.
"""
