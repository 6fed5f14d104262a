"""The exception of a failed build."""


class BuildError(RuntimeError):
    """An operator that could not be built or loaded; the message says why and what to do.

    Attributes:
        unit: name of the operator, or None where the cause concerns them all.
        log: path of the compiler's whole output, or None where no compiler ran.
    """

    def __init__(self, message: str, unit: str | None = None, log: str | None = None):
        super().__init__(message)
        self.unit = unit
        self.log = log
