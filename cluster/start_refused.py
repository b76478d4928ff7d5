"""The one error for "this cluster cannot start and the user can do something about it"."""


class StartRefused(Exception):
    """``message`` is one line for the user; ``exit_code`` as of the command line (2 configuration, 3 environment)."""

    def __init__(self, message: str, exit_code: int = 3) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
