"""How a process of this program starts another one. Standard library only: known before slow imports begin."""

import sys
from typing import Final

NOTHING_FROM_HERE: Final = "-P"
"""Nothing is imported from the working directory: a user's ``html.py`` or ``random.py`` there is not the library's."""

PYTHON_MODULE: Final = (sys.executable, NOTHING_FROM_HERE, "-m")
"""To be followed by the module's name."""
