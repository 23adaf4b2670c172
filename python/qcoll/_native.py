"""Loads the compiled half, once, with an error that a user can act on."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import torch

_INSTALL = "`pip install --no-build-isolation --force-reinstall --no-deps .` in its source tree"


class _WrongTorch(ImportError):
    """Says all there is to say already."""


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


@functools.cache
def load() -> Any:
    """The module ``qcoll._C``.

    Raises:
        ImportError: qcoll was not built, or was built for another torch.
    """
    try:
        build: ModuleType = importlib.import_module("qcoll._build")
        if _minor(build.TORCH_VERSION) != _minor(torch.__version__):
            raise _WrongTorch(
                f"qcoll was built for torch {build.TORCH_VERSION} but torch {torch.__version__} is "
                "installed; torch's C++ interface changes with every minor version. Rebuild it "
                f"({_INSTALL}), or install torch {_minor(build.TORCH_VERSION)}"
            )
        return importlib.import_module("qcoll._C")
    except _WrongTorch:
        raise
    except ImportError as error:
        raise ImportError(
            f"qcoll's compiled half cannot be loaded ({error}); build it: {_INSTALL}"
        ) from error
