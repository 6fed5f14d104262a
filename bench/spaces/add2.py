"""The space of add2, whose gradients are grad_out itself."""

from functools import partial

from . import elementwise

draw = partial(elementwise.draw, inputs=2)
tasks = partial(elementwise.tasks, inputs=2, name="add2", peer=lambda a, b: a + b, gradient=False)
