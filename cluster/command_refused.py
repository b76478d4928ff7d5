"""An operator's command that is not carried out."""


class CommandRefused(Exception):
    """The message says what is wrong and what is allowed."""
