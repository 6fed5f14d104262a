"""The space of square."""

from functools import partial

from . import elementwise

draw = partial(elementwise.draw, inputs=1)
tasks = partial(elementwise.tasks, inputs=1, name="square", peer=lambda x: x * x, gradient=True)
