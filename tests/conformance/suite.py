"""torch's own DistributedTest suite, from the installed wheel, imported so that it tests qcoll.

The fork server imports this module once, so that a test costs a fork and not an import. Read at
import: WORLD_SIZE. Three things in the suite stand in the way of a backend that it does not know:

* lists of backends with a feature, read by decorators at import: qcoll is put on them before that;
* tests gated by name, as ``BACKEND == "gloo"``: the name compares equal to those of gloo and MPI,
  on whose tests gloo itself never runs (all-to-all);
* tests of subgroups, skipped below 8 ranks although 3 will do.

Decorators that would start processes only to have them exit as skipped skip at once instead, and
the barrier between processes polls more often and is more patient than torch's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import unittest
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.testing._internal import common_distributed as common

NAME = "torch.testing._internal.distributed.distributed_test"
WORLD = int(os.environ["WORLD_SIZE"])
SMALLEST_WITH_SUBGROUPS = 3

_EDITS = {
    'BACKEND = os.environ["BACKEND"]\n': "\n",  # given by _import_suite
    "if BACKEND not in backends:": "if all(BACKEND != name for name in backends):",
    "def sync(cls, wait_for=None, timeout=10):": "def sync(cls, wait_for=None, timeout=60):",
    'raise RuntimeError("barrier timeout")\n            time.sleep(0.1)': (
        'raise RuntimeError("barrier timeout")\n            time.sleep(0.01)'
    ),
}


class _Backend(str):
    """The name "qcoll", equal to "gloo" and "mpi" too."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other in (str(self), "gloo", "mpi")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __str__(self) -> str:
        return self[:]  # a plain string


def _edit_decorators() -> None:
    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        common.DistTestCases.backend_feature[feature].add("qcoll")

    def skip_if_lt_x_gpu(count: int, *, allow_cpu: bool = False) -> Callable[..., Any]:
        return unittest.skipUnless(allow_cpu, f"needs {count} GPUs")

    common.skip_if_no_gpu = unittest.skip("needs a GPU")
    common.skip_if_lt_x_gpu = skip_if_lt_x_gpu
    common.skip_if_odd_worldsize = unittest.skipIf(WORLD % 2 == 1, "needs an even world")
    common.skip_if_small_worldsize = unittest.skipIf(
        WORLD < SMALLEST_WITH_SUBGROUPS, f"needs {SMALLEST_WITH_SUBGROUPS} ranks"
    )


def _import_suite() -> ModuleType:
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    for before, after in _EDITS.items():
        assert source.count(before) == 1, f"{before!r} is not once in {spec.origin}"
        source = source.replace(before, after)
    module = importlib.util.module_from_spec(spec)
    module.BACKEND = _Backend("qcoll")
    sys.modules[NAME] = module  # where its classes are looked for when they are unpickled
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


# Some decorators look at these; a test has its own file.
os.environ |= {"BACKEND": "qcoll", "INIT_METHOD": "file://"}
_edit_decorators()
_suite = _import_suite()
common.logger.setLevel("ERROR")


class Suite(_suite.TestDistBackend, _suite.DistributedTest._DistTestBase):
    """The suite with all its tests; no unittest runner ever sees it."""


def applicable() -> list[str]:
    """The suite's tests that this world runs: the others need GPUs, or more or other ranks."""
    names = unittest.TestLoader().getTestCaseNames(Suite)
    return [n for n in names if not getattr(getattr(Suite, n), "__unittest_skip__", False)]


# Below: roles of forked processes.


def list_tests(connection: Connection) -> None:
    connection.send(applicable())


def run_rank(connection: Connection) -> None:
    """One rank of one test: sends its exit status and what went wrong."""
    test, rank, store = connection.recv()
    _suite.INIT_METHOD = os.environ["INIT_METHOD"]
    ours, theirs = Pipe()
    status: object = None
    try:
        Suite._run(rank, test, store, theirs)
    except SystemExit as error:
        status = error.code
    text = ""
    with contextlib.suppress(EOFError):
        if ours.poll():
            text = ours.recv()
    skips = [skip.message for skip in common.TEST_SKIPS.values() if skip.exit_code == status]
    connection.send((status, text or "".join(skips)))
