"""Tensors of any layout, element by element: square and add2."""

import torch

import loader

from . import (
    DTYPES,
    Task,
    agree,
    backward,
    choose,
    every_other,
    fetched,
    log_uniform,
    misaligned,
    padded,
)
from . import size as draw_size

LAYOUTS = {
    "plain": 8,
    "misaligned": 4,
    "rows apart": 3,
    "transposed": 2,
    "every other": 1,
    "one row": 1,  # expanded
}


def draw(random, largest, inputs):
    """Return a case: rows of any length, each input in a layout of its own."""
    dtype = choose(random, DTYPES)
    element = getattr(torch, dtype).itemsize
    numel = max(1, log_uniform(random, 1 << 15, largest // (inputs + 1)) // element)
    columns = min(draw_size(random, 1, 1 << 14), numel)
    alike = random.random() < 0.6
    layouts = [choose(random, LAYOUTS) for _ in range(inputs)]
    return {
        "rows": numel // columns,
        "columns": columns,
        "dtype": dtype,
        "layouts": layouts[:1] * inputs if alike else layouts,
        "shift": random.randint(1, 15),
    }


def laid_out(x, layout, shift):
    """Return a copy of it in a layout."""
    return {
        "plain": lambda: x,
        "misaligned": lambda: misaligned(x, shift),
        "rows apart": lambda: padded(x, 1, shift // 2, shift - shift // 2),
        "transposed": lambda: x.t().contiguous().t(),
        "every other": lambda: every_other(x),
        "one row": lambda: x[:1].expand_as(x),
    }[layout]()


def read_of(x, layout):
    """Return how many bytes have to be read of it, with what shares a line of memory with them."""
    if layout in ("every other", "rows apart"):
        return fetched(x)
    return x.nbytes / (len(x) if layout == "one row" else 1)


def tasks(case, make, inputs, name, peer, gradient):
    """Return forward, and where the operator has a kernel for it the gradient to its first."""
    dtype = getattr(torch, case["dtype"])
    shape, args = (case["rows"], case["columns"]), []
    for layout in case["layouts"]:
        x = torch.empty(shape, dtype=dtype, device=make["device"])
        x.uniform_(-1, 1, generator=make["generator"])
        args.append(laid_out(x, layout, case["shift"]))
    ours = getattr(loader, name)
    agree(ours(*args), peer(*args), 2 * torch.finfo(dtype).eps, case)
    functions = {"loader": ours, "eager": peer}
    forward = {who: lambda f=f: f(*args) for who, f in functions.items()}
    out = ours(*args)
    size = out.numel() * out.element_size()
    read = sum(read_of(x, layout) for x, layout in zip(args, case["layouts"], strict=True))
    found = {"forward": Task(forward, read + size, out.numel())}
    if gradient:
        grad = torch.ones_like(out)
        back = {who: backward(f, args, [0], grad) for who, f in functions.items()}
        found["backward"] = Task(back, read + 2 * size, 2 * out.numel())
    return found
