"""Compiled inner loops of the engine: what the processor can do and torch has no call for.

Machine code is kept between runs in the user's cache directory, under a digest of these sources: numba itself looks
only at the file of a function, not at what the function calls. It is nobody's data and can be deleted at any time.
"""

import hashlib
import tempfile
from pathlib import Path

import numba
import platformdirs


def _cache_dir() -> Path:
    """Where the machine code of exactly these sources lies; without a home, a directory of this process alone."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    cache = Path(platformdirs.user_cache_dir("pdconsole")) / "kernels" / digest.hexdigest()[:16]
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except OSError:
        return Path(tempfile.mkdtemp(prefix="pdconsole-kernels-"))


numba.config.CACHE_DIR = str(_cache_dir())
