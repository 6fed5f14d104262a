"""The space of bilinear_interpolation: rows.py's, with 2 axes."""

from functools import partial

from . import rows

draw = partial(rows.draw, D=2)
tasks = partial(rows.tasks, D=2, name="bilinear_interpolation")
