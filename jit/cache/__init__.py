"""What was built: keys, the store, locks, the index of a warm import, pruning, explanations.

Imports `machine` and `errors`.
"""
