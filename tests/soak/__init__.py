"""A soak, `python -m tests.soak`: random checked collectives with deaths, for many minutes."""

import sys
from pathlib import Path

# The references of the tests of collectives lie there, importable by name only so.
sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
