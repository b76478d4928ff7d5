"""The error that commands raise for what a user can cause and can mend."""

from typing import Final

EXIT_USAGE: Final = 2
EXIT_ENVIRONMENT: Final = 3
"""Exit codes: wrong usage or configuration; the environment lacks something."""


class UserError(Exception):
    """One line for the user, naming the thing, its value and what is allowed; and the exit code of the command line."""

    def __init__(self, message: str, exit_code: int = EXIT_USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
