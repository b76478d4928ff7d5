"""A disk that is full, for this process and those it starts, without needing one."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond that: writing raises OSError ("File too large"), as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
