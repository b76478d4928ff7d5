"""Files written whole or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path``; readers see the old file or the new one, never half of either. Raises OSError.

    A symbolic link is followed. What is no regular file (a pipe, a terminal, /dev/null) is written to, not replaced.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    target = path.resolve()
    draft = target.with_name(f"{target.name}.{os.getpid()}.draft")
    try:
        draft.write_bytes(content)
        draft.replace(target)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
