"""Entry of the processes that this package starts: ``python -m qcoll.testing ROLE ...``."""

import os
import sys
from pathlib import Path


def main(role: str, *arguments: str) -> int:
    """Play ``role``; the exit status."""
    if role == "rank":
        from qcoll.testing.spawn import rank_main

        status = rank_main(Path(arguments[0]))
        sys.stdout.flush()
        sys.stderr.flush()
        # No interpreter teardown: gloo's thread may still hold the last collective's tensors, and a
        # thread that asks for the interpreter while it is taken down aborts the process.
        os._exit(status)
    if role == "fork-server":
        from qcoll.testing import fork_server

        fork_server.main(int(arguments[0]), arguments[1:])
        return 0
    print(f"unknown role {role!r}: this module is started by qcoll.testing itself", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
