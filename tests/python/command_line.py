"""Programs as a user would start them."""

from __future__ import annotations

import os
import subprocess


def run(
    words: list[str], env: dict[str, str] | None = None, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a command line as a user would; checks its exit status."""
    done = subprocess.run(
        words,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done
