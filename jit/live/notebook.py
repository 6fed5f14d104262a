"""`%load_ext loader`: what a notebook gets: edits taken in before each cell, and `%%cuda`."""

import contextlib
from typing import TYPE_CHECKING

from .reload import stand_by, take_in_edits
from .reloader import Interrupted

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load(shell: "InteractiveShell") -> None:
    """Before each cell of `shell` look for edited sources; the cells' magic `%%cuda`."""
    stand_by()
    unload(shell)  # once is enough, however often it is loaded
    shell.events.register("pre_run_cell", before_cell)

    def cuda(line: str, cell: str) -> None:
        """`%%cuda NAME CONSTANT=VALUE ...`: the kernels of this cell, as the module NAME."""
        from ..source.module import magic

        magic(line, cell, shell.user_ns)

    shell.register_magic_function(cuda, "cell")


def unload(shell: "InteractiveShell") -> None:
    """Undo `load`."""
    with contextlib.suppress(ValueError):  # it was not loaded
        shell.events.unregister("pre_run_cell", before_cell)
    shell.magics_manager.magics["cell"].pop("cuda", None)


def before_cell(info: object = None) -> None:
    """Take in edits, and show what came of them; below 1 ms where nothing was edited.

    A Ctrl-C meanwhile ends the cell too, before it begins.
    """
    try:
        report = take_in_edits()
    except Interrupted as interrupted:
        report = interrupted.report
        _skip_cell()
    if report:
        from IPython.display import display

        display(report)


def _skip_cell() -> None:
    """Have IPython reject the cell that is about to run."""
    from IPython import get_ipython
    from IPython.core.error import InputRejected

    transformers = get_ipython().ast_transformers

    class Reject:
        def visit(self, node: object) -> None:
            transformers.remove(self)
            raise InputRejected("interrupted before the cell began")

    transformers.append(Reject())
