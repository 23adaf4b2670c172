"""What the layout of the sources promises: includes point one way, files stay small, names explain
themselves, and the binding is compiled against torch's own pybind11.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import qcoll
from qcoll import _native

ROOT = Path(__file__).parents[2]
CORE = ROOT / "libqcoll" / "qcoll"

#: Inner to outer: a folder may include itself and what comes before it.
ORDER = ("base", "wire", "codec", "transport", "topo", "algo", "host", "cuda", "state", "comm")
#: Besides the order: codecs and transports meet in host/ and cuda/ alone.
APART = {"transport": {"codec"}, "algo": {"codec", "transport"}}
MAX_LINES = 450
MAX_FUNCTION = 80
SOURCES = (".cc", ".h", ".inl", ".cu", ".cuh", ".py", ".cmake", ".sh", ".pyi")

in_repository = pytest.mark.skipif(
    not CORE.is_dir(), reason="the sources are not beside the tests: nothing to look at"
)


def includes(file: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', file.read_text(), re.MULTILINE)


def core_files() -> Iterator[tuple[str, Path]]:
    """(folder, file) of the core's sources."""
    for file in sorted(CORE.rglob("*")):
        if file.suffix in (".h", ".cc", ".inl", ".cu", ".cuh"):
            yield file.relative_to(CORE).parts[0], file


def tracked(*suffixes: str) -> list[Path]:
    """Files that git tracks; all files where there is no git."""
    command = ["git", "ls-files", "--cached", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.split("\0") if listed.returncode == 0 else []
    files = [ROOT / name for name in names if name] or [
        file for file in ROOT.rglob("*") if not {"build", ".venv", ".git"} & set(file.parts)
    ]
    return [file for file in files if file.is_file() and file.suffix in suffixes]


@in_repository
def test_every_folder_of_the_core_has_its_place() -> None:
    folders = {folder for folder, _ in core_files()}
    assert folders <= set(ORDER)
    assert {"base", "wire", "codec", "transport", "topo", "algo", "host", "comm"} <= folders


@in_repository
def test_includes_point_one_way() -> None:
    wrong = []
    for folder, file in core_files():
        for name in includes(file):
            if not name.startswith("qcoll/"):
                continue
            other = name.split("/")[1]
            assert (CORE.parent / name).exists(), f"{file} includes {name}, which is not there"
            outward = ORDER.index(other) > ORDER.index(folder)
            if outward or other in APART.get(folder, ()):
                wrong.append(f"{file.relative_to(ROOT)} includes {name}")
    assert not wrong


@in_repository
def test_the_core_knows_neither_torch_nor_python() -> None:
    foreign = re.compile(r"^(torch|c10|ATen|pybind11|Python\.h)")
    wrong = [
        f"{file.relative_to(ROOT)} includes {name}"
        for _, file in core_files()
        for name in includes(file)
        if foreign.match(name)
    ]
    assert not wrong


@in_repository
def test_includes_of_the_core_are_written_in_full() -> None:
    """ "qcoll/wire/header.h", never "header.h": the folder is the include path."""
    for _, file in core_files():
        text = file.read_text()
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
            assert name.startswith("qcoll/"), f"{file.relative_to(ROOT)} includes {name}"


@in_repository
def test_the_binding_reaches_the_core_from_above() -> None:
    """Nothing of the core includes the binding; the binding never includes torch/extension.h."""
    binding = {file.name for file in (ROOT / "cpp").glob("*.h")}
    for _, file in core_files():
        assert not binding & {Path(name).name for name in includes(file) if "/" not in name}
    for file in (ROOT / "cpp").iterdir():
        if file.suffix in (".h", ".cc"):
            assert "torch/extension.h" not in includes(file), file


@in_repository
def test_no_file_is_too_long() -> None:
    long = {
        str(file.relative_to(ROOT)): lines
        for file in tracked(*SOURCES)
        if (lines := len(file.read_text().splitlines())) > MAX_LINES
    }
    assert not long


@in_repository
def test_no_python_function_is_too_long() -> None:
    long = []
    for file in tracked(".py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 > MAX_FUNCTION:
                    long.append(f"{file.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not long


def test_the_binding_has_torchs_pybind11() -> None:
    """Another internals version would not know c10d's types."""
    header = Path(torch.__file__).parent / "include/pybind11/detail/internals.h"
    match = re.search(r"define PYBIND11_INTERNALS_VERSION (\d+)", header.read_text())
    assert match is not None
    assert int(_native.load().pybind11_internals_version) == int(match[1])
    assert _native.load().built_for_torch.split("+")[0] == torch.__version__.split("+")[0]


def test_public_names_exist_and_explain_themselves() -> None:
    assert sorted(qcoll.__all__) == list(qcoll.__all__)
    silent = []
    for name in qcoll.__all__:
        thing = getattr(qcoll, name)
        if not (inspect.getdoc(thing) or "").strip():
            silent.append(name)
        if inspect.isclass(thing):
            for method, value in vars(thing).items():
                public = not method.startswith("_") and callable(value)
                if public and not (inspect.getdoc(value) or "").strip():
                    silent.append(f"{name}.{method}")
    assert not silent


def test_public_names_are_all_that_is_public() -> None:
    assert set(qcoll.__all__) <= set(dir(qcoll)) | set(qcoll._HOME)
    with pytest.raises(AttributeError, match="no attribute 'all_gather_tensor'"):
        _ = qcoll.all_gather_tensor
    for name in qcoll.__all__:
        # Where it is documented is where it says that it lives.
        assert getattr(getattr(qcoll, name), "__module__", "qcoll").startswith("qcoll")
