"""`%load_ext loader`: what a notebook gets: edits taken in before each cell, and `%%cuda`."""

from .reload import stand_by, take_in_edits


def load(shell) -> None:
    """Before each cell of `shell` look for edited sources; the cells' magic `%%cuda`."""
    stand_by()
    shell.events.register("pre_run_cell", before_cell)
    shell.register_magic_function(_cuda(shell), "cell", "cuda")


def unload(shell) -> None:
    """Undo `load`."""
    shell.events.unregister("pre_run_cell", before_cell)
    shell.magics_manager.magics["cell"].pop("cuda", None)


def before_cell(info=None) -> None:
    """Take in edits, and show what came of them; below 1 ms where nothing was edited."""
    if report := take_in_edits():
        from IPython.display import display

        display(report)


def _cuda(shell):
    def cuda(line: str, cell: str):
        """`%%cuda NAME CONSTANT=VALUE ...`: the kernels of this cell, as the module NAME."""
        from ..source.module import magic

        return magic(line, cell, shell.user_ns)

    return cuda
