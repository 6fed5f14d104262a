"""Edits in a running process: found, built, tried, put in place, or refused.

Imports `operators` and all that this one imports; `source` for the notebook's `%%cuda`.
"""
