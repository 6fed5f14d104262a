"""The space of trilinear_interpolation: rows.py's, with 3 axes."""

from functools import partial

from . import rows

draw = partial(rows.draw, D=3)
tasks = partial(rows.tasks, D=3, name="trilinear_interpolation")
