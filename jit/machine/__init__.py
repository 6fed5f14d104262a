"""What there is to work with: settings, sources, the toolchain, a clock.

Imports nothing of the other rooms but `errors`.
"""
