"""How torch learns the name qcoll, with and without an import, and what happens when it cannot.

Each program runs in a fresh process: registration happens once, at the end of ``import torch``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib.metadata import entry_points

import pytest
import torch
import torch.distributed as dist
from policy_probe import expect_error

import qcoll
from qcoll.testing import shared_pool

START = "dist.init_process_group({name}store=dist.HashStore(), rank=0, world_size=1)\n"
QCOLL = START.format(name='"qcoll", ')
NAME = "dist.distributed_c10d._get_default_group()._get_backend(torch.device('cpu')).name()"
TORCH = "import torch, torch.distributed as dist, sys\n"
SUM = "x = torch.ones(5); dist.all_reduce(x); print(x.tolist())\n"

has_entry_point = pytest.mark.skipif(
    not any(entry.name == "qcoll" for entry in entry_points(group="torch.backends")),
    reason="qcoll is on the path but not installed: torch finds no entry point of it",
)


def python(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs ``program`` in a fresh interpreter."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("QCOLL_")}
    path = ":".join(entry or "." for entry in sys.path)
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def succeed(program: str, **env: str) -> str:
    """The output of ``program``, which must end well and print no error."""
    done = python(program, **env)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@has_entry_point
def test_the_name_alone_is_enough() -> None:
    printed = succeed(
        TORCH
        + "print('qcoll._C' in sys.modules, 'qcoll._options' in sys.modules)\n"
        + QCOLL
        + f"print({NAME})\n"
        + SUM
        + "import qcoll; print(qcoll.stats()['all_reduce']['calls'])\n"
    )
    # Importing torch must not cost the compiled half.
    assert printed.splitlines() == ["False False", "qcoll", "[1.0, 1.0, 1.0, 1.0, 1.0]", "1"]


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_an_import_before_torch_works_too(autoload: str) -> None:
    program = "import qcoll\n" + TORCH + QCOLL + f"print({NAME})\n"
    assert succeed(program, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload) == "qcoll\n"


def test_without_autoload_the_import_is_needed() -> None:
    program = (
        TORCH
        + "try:\n    "
        + QCOLL
        + "except Exception as error:\n    print('qcoll' in str(error), 'qcoll' in sys.modules)\n"
        + "import qcoll\n"
        + QCOLL
        + f"print({NAME})\n"
    )
    printed = succeed(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert printed.splitlines() == ["True False", "qcoll"]


@has_entry_point
def test_qcoll_default_serves_programs_that_name_no_backend() -> None:
    program = (
        TORCH
        + "from torch.distributed.device_mesh import init_device_mesh\n"
        + START.format(name="")
        + f"print({NAME})\n"
        + SUM
        + "mesh = init_device_mesh('cpu', (1,))\n"
        + "for group in (mesh.get_group(), dist.new_group([0])):\n"
        + "    print(group._get_backend(torch.device('cpu')).name())\n"
    )
    printed = succeed(program, QCOLL_DEFAULT="1").splitlines()
    assert printed == ["qcoll", "[1.0, 1.0, 1.0, 1.0, 1.0]", "qcoll", "qcoll"]


@has_entry_point
def test_without_qcoll_default_torch_keeps_its_own() -> None:
    program = TORCH + START.format(name="") + f"print({NAME})\n"
    assert succeed(program, QCOLL_DEFAULT="0") == "gloo\n"


# Makes modules fail to import, as broken installations would.
BREAK = """
import sys
broken = {}
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in broken:
            raise broken[name]
sys.meta_path.insert(0, Finder())
def use():
    import qcoll
    for what in (start, lambda: qcoll.Options()):
        sys.modules.pop("qcoll._build", None)
        try:
            what()
        except ImportError as error:
            print("ImportError:", error)
"""
DEFINE_START = "def start():\n    " + QCOLL
SUM_ON_GLOO = START.format(name='"gloo", ') + SUM + "dist.destroy_process_group()\n"


@has_entry_point
def test_a_broken_build_breaks_only_its_use_and_says_how_to_mend_it() -> None:
    causes = (
        ("qcoll._C", "ImportError('libc10.so: cannot open shared object file')"),
        ("qcoll._C", "ModuleNotFoundError('No module named qcoll._C')"),
        ("qcoll._build", "ModuleNotFoundError('No module named qcoll._build')"),
    )
    program = BREAK + f"broken[{causes[0][0]!r}] = {causes[0][1]}\n" + TORCH + SUM_ON_GLOO
    program += DEFINE_START
    for module, error in causes:
        program += f"broken.clear(); broken[{module!r}] = {error}\nuse()\n"
    gloo, *errors = succeed(program).splitlines()
    assert gloo == "[1.0, 1.0, 1.0, 1.0, 1.0]"
    assert len(errors) == 2 * len(causes), errors
    for text in errors:
        assert "qcoll" in text
        assert "pip install" in text
    assert "libc10.so" in errors[0]  # the cause stays visible


def test_autoload_warns_instead_of_raising(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(dist.Backend, "_plugins", {})
    monkeypatch.setattr(dist.Backend, "register_backend", fail)
    with pytest.warns(UserWarning, match=r"qcoll could not register.*disk on fire"):
        qcoll.autoload()


def test_a_build_for_another_torch_is_refused() -> None:
    wrong = ("2.12.1", "2.14.0+cu130", "3.0.0")
    major, minor = torch.__version__.split(".")[:2]
    program = "import torch, qcoll._build\n" + BREAK + TORCH + DEFINE_START
    for version in wrong:
        program += f"qcoll._build.TORCH_VERSION = {version!r}\nuse()\n"
    program += "print('qcoll._C' in sys.modules)\n"
    # Another patch release of the same minor version will do.
    program += f"qcoll._build.TORCH_VERSION = '{major}.{minor}.99+cu999'\nstart()\nprint({NAME})\n"
    program = program.replace('sys.modules.pop("qcoll._build", None)', "pass")
    *errors, loaded, name = succeed(program).splitlines()
    assert loaded == "False"  # refused before anything of it could run
    assert name == "qcoll"
    assert len(errors) == 2 * len(wrong)
    for version, text in zip([v for v in wrong for _ in range(2)], errors, strict=True):
        assert f"built for torch {version}" in text
        assert torch.__version__ in text
        assert "pip install" in text


def test_registered_for_cpu_and_cuda_and_default_for_neither() -> None:
    assert dist.Backend.backend_capability["qcoll"] == ["cpu", "cuda"]
    assert dist.is_backend_available("qcoll")
    assert dist.Backend("qcoll") == "qcoll"
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    before = dict(dist.Backend._plugins)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qcoll.register()
        qcoll.autoload()
    assert dist.Backend._plugins == before


def devices() -> None:
    group = dist.distributed_c10d._get_default_group()
    cpu, cuda = (group._get_backend(torch.device(device)) for device in ("cpu", "cuda"))
    assert cpu.name() == cuda.name() == "qcoll"
    meta = torch.empty(8, device="meta")
    calls = (
        lambda: qcoll.all_reduce(meta),
        lambda: qcoll.all_gather_into_tensor(torch.empty(16), meta),
        lambda: qcoll.all_gather_into_tensor(torch.empty(16, device="meta"), torch.empty(8)),
        lambda: qcoll.reduce_scatter_tensor(torch.empty(4), meta),
        lambda: qcoll.all_to_all_single(torch.empty(8), meta, codec="int8"),
        lambda: cpu.allreduce([meta], dist.AllreduceOptions()),
        lambda: cpu.broadcast([meta], dist.BroadcastOptions()),
    )
    for call in calls:
        expect_error(call, "meta", "CUDA", "cpu:qcoll,cuda:nccl")
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3


def test_tensors_of_another_device_are_refused_with_the_way_out() -> None:
    shared_pool(2, [1, 1]).run(devices, backend="qcoll")


def per_device(backend: str, cpu: str) -> None:
    dist.init_process_group(backend)
    group = dist.distributed_c10d._get_default_group()
    assert group._get_backend(torch.device("cpu")).name() == cpu
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3
    if cpu != "qcoll":
        expect_error(qcoll.stats, "gloo", 'backend="qcoll"')


@pytest.mark.parametrize(
    ("backend", "cpu"), [("cpu:qcoll", "qcoll"), ("cpu:gloo,cuda:qcoll", "gloo"), ("gloo", "gloo")]
)
def test_backends_per_device(backend: str, cpu: str) -> None:
    shared_pool(2, [1, 1]).run(per_device, (backend, cpu), backend=None)
