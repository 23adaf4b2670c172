"""``python -m qcoll.cli``."""

from qcoll.cli import main

main()
