"""A function call that travels to ranks in other processes, and its execution there."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = Path(__file__).parent

#: A function at a module's top level, "package.module:function", or "path/to/file.py:function".
Function = Callable[..., Any] | str


@dataclass(frozen=True)
class GroupSpec:
    """The default process group that a call runs in, as plain data.

    Attributes:
        backend: as ``init_process_group`` takes it; None leaves the group to the function.
        pg_options: keyword arguments of ``qcoll.Options``; only for backends that name qcoll.
        timeout: of the group's collectives, in seconds.
    """

    backend: str | None = "gloo"
    pg_options: Mapping[str, Any] | None = None
    timeout: float = 60.0

    def init(self) -> None:
        """Initialise the default process group from the environment, if there is to be one."""
        import torch.distributed as dist

        if self.backend is None:
            return
        options = None
        if self.pg_options is not None:
            if "qcoll" not in self.backend:
                raise ValueError(f"pg_options given, but backend {self.backend!r} is not qcoll")
            options = importlib.import_module("qcoll").Options(**self.pg_options)
        dist.init_process_group(
            self.backend,
            timeout=timedelta(seconds=self.timeout),
            pg_options=options,
        )


@dataclass(frozen=True)
class Call:
    """One function call, the same on every rank."""

    module: str
    path: str
    name: str
    args: tuple[Any, ...] = ()
    group: GroupSpec = field(default_factory=GroupSpec)
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        function: Function,
        args: Sequence[Any] = (),
        group: GroupSpec | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Call:
        """Describe a call; ValueError when another process could not find ``function``."""
        module, path, name = _locate(function)
        return cls(module, path, name, tuple(args), group or GroupSpec(), dict(env or {}))

    def __str__(self) -> str:
        return f"{Path(self.path).name if self.path else self.module}:{self.name}"

    def __call__(self) -> Any:
        """Find the function in this process and call it."""
        module = _load(self.module, self.path)
        function = functools.reduce(getattr, self.name.split("."), module)
        with environment(self.env):
            return function(*self.args)  # type: ignore[operator]


def attempt(work: Callable[[], Any]) -> bytes:
    """Run ``work``; return a pickle of (value, None) or of (None, traceback text)."""
    try:
        return pickle.dumps((work(), None))
    except BaseException:  # whatever ends a call is its result, SystemExit too
        return pickle.dumps((None, _traceback_text()))


def _traceback_text() -> str:
    """The exception being handled, without the frames of this package that led to the call."""
    kind, error, trace = sys.exc_info()
    inner = trace
    while inner is not None and Path(inner.tb_frame.f_code.co_filename).parent == _PACKAGE:
        inner = inner.tb_next
    return "".join(traceback.format_exception(kind, error, inner or trace))


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while, then put back what was there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _locate(function: Function) -> tuple[str, str, str]:
    """(module, source file or "", name) of a function."""
    if isinstance(function, str):
        place, separator, name = function.rpartition(":")
        if not separator:
            raise ValueError(f"function {function!r} is not 'module:function' or 'file:function'")
        if place.endswith(".py"):
            return Path(place).stem, str(Path(place).resolve()), name
        return place, "", name
    if "<" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} is local or a lambda: ranks cannot import it")
    path = inspect.getsourcefile(function)
    return function.__module__, str(Path(path).resolve()) if path else "", function.__qualname__


def _load(name: str, path: str) -> ModuleType:
    """The module ``name``, from the import path if that is the file ``path``, else from the file.

    Test files are often not importable by name, but what they return must unpickle elsewhere under
    the same module name, so a file is loaded under the name that it had.
    """
    if name == "__main__":
        name = "__rank_main__"  # keeps its `if __name__ == "__main__"` asleep
    elif not path or _file_of(name) == path:
        return importlib.import_module(name)
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == path:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _file_of(name: str) -> str | None:
    """The file that ``import name`` would load, resolved; None when it would find none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return str(Path(spec.origin).resolve()) if spec and spec.origin else None
