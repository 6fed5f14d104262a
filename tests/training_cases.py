"""What tests/test_training.py has ranks do: the examples that learn, together and alone."""

import sys
from pathlib import Path

import torch
from ranks import mesh

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import fit_image
import fit_volume
import together

STEPS = 6


def image(size: int, how: str, folder: str = "", until: int = STEPS, device="cpu"):
    """Learn an image for some steps, from a checkpoint where there is one, and leave one.

    Returns: the losses, all that was learned, and the step begun from.
    """
    on = mesh(size) if size > 1 else None
    if size > 1 and on is None:
        return None
    processes = together.Together(device, on, how)
    torch.manual_seed(0)
    photo = torch.rand(32, 48, 3, device="cpu").to(device)
    field, state, step = fit_image.learner(photo, STEPS, processes, batch=256)
    if folder:
        processes.load(Path(folder), **state)
    begun = state["decay"].last_epoch
    losses = [processes.mean(step()).item() for _ in range(begun, until)]
    if until < STEPS:
        processes.save(Path(folder), until, **state)
    learned = {name: together.whole(x).detach().cpu() for name, x in field.state_dict().items()}
    return losses, {name.removeprefix("module."): x for name, x in learned.items()}, begun


def volume(size: int, how: str, device="cpu"):
    """Recover a volume and offsets: the history."""
    on = mesh(size) if size > 1 else None
    if size > 1 and on is None:
        return None
    with torch.device("cpu"):  # where it is drawn, wherever tensors are made otherwise
        problem = fit_volume.make_problem(device)
    return fit_volume.fit(*problem, STEPS, together.Together(device, on, how), None)


def unlike() -> str:
    """A batch that cannot be parted."""
    together.Together("cpu", mesh(4)).part(10)
