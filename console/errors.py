"""The error that commands raise for what a user can cause and can mend."""


class UserError(Exception):
    """One line for the user, naming the thing, its value and what is allowed; and the exit code of the command line."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
