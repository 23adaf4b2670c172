"""The project's own measurements: qcoll next to gloo and MPI, each in fresh network namespaces.

    python bench/collectives.py --list
    python bench/collectives.py gather_1gbit small_two_hosts --rounds 5

Each scenario is one interleaved comparison and leaves ``bench/results/NAME.json``, which
``qcoll plot`` draws. Needs root where a scenario has a link.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from qcoll.bench import BenchError, Config, Place, launch, parse_size, write_json
from qcoll.bench.launch import find_mpirun
from qcoll.bench.table import print_report

_RESULTS = Path(__file__).parent / "results"
_ALL = ("exact", "int8", "int4")
_64M = (64 << 20,)
_SMALL = tuple(1 << power for power in range(10, 21, 2))


@dataclass(frozen=True)
class Scenario:
    """One comparison in one place.

    Attributes:
        about: one line for people.
    """

    about: str
    config: Config
    place: Place


def _large(
    *verbs: str,
    codecs: tuple[str, ...] = _ALL,
    sizes: tuple[int, ...] = _64M,
    in_place: bool = False,
) -> Config:
    """Calls that take long enough for one to be an iteration."""
    return Config(verbs, sizes, codecs, iters=9, warmup=1, min_seconds=1.0, in_place=in_place)


def _small(*verbs: str) -> Config:
    """Calls of microseconds: many in an iteration, so that leaving the barrier costs little."""
    return Config(verbs, (1 << 10,), _ALL, iters=60, warmup=3, calls=50)


_PAIR, _FOUR, _TWO_BY_TWO = (1, 1), (1, 1, 1, 1), (2, 2)
_VERBS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

SCENARIOS = {
    "gather_1gbit": Scenario(
        "all-gather of 64 MiB between 2 hosts, 1 Gbit/s",
        _large("all_gather"),
        Place(_PAIR, "1gbit"),
    ),
    "gather_200mbit": Scenario(
        "all-gather of 16 MiB between 2 hosts, 200 Mbit/s",
        _large("all_gather", sizes=(16 << 20,)),
        Place(_PAIR, "200mbit"),
    ),
    "scatter_1gbit": Scenario(
        "reduce-scatter of 64 MiB between 2 hosts, 1 Gbit/s",
        _large("reduce_scatter"),
        Place(_PAIR, "1gbit"),
    ),
    "reduce_1gbit": Scenario(
        "all-reduce of 1 KiB to 1 MiB and 64 MiB between 2 hosts, 1 Gbit/s",
        _large("all_reduce", codecs=("exact", "int8"), sizes=_SMALL + _64M),
        Place(_PAIR, "1gbit"),
    ),
    "four_hosts_1gbit": Scenario(
        "all-gather and reduce-scatter of 64 MiB between 4 hosts, 1 Gbit/s",
        _large("all_gather", "reduce_scatter", codecs=("exact", "int8")),
        Place(_FOUR, "1gbit"),
    ),
    "two_by_two_1gbit": Scenario(
        "all-gather and reduce-scatter of 64 MiB, 2 hosts of 2 ranks, 1 Gbit/s",
        _large("all_gather", "reduce_scatter"),
        Place(_TWO_BY_TWO, "1gbit"),
    ),
    "gather_5gbit": Scenario(
        "all-gather of 64 MiB between 2 hosts, 5 Gbit/s, MTU 9000",
        _large("all_gather"),
        Place(_PAIR, "5gbit", 9000),
    ),
    "gather_uncapped": Scenario(
        "all-gather of 64 MiB between 2 hosts, link without a cap",
        _large("all_gather"),
        Place(_PAIR, "none"),
    ),
    "small_same_host": Scenario(
        "1 KiB, every verb, 2 ranks on the same host",
        _small(*_VERBS),
        Place((2,)),
    ),
    "small_two_hosts": Scenario(
        "1 KiB, every verb, between 2 hosts, link without a cap",
        _small(*_VERBS),
        Place(_PAIR, "none"),
    ),
    "in_place_same_host": Scenario(
        "all-gather and reduce-scatter of 64 MiB in place, 2 ranks on the same host",
        _large("all_gather", "reduce_scatter", in_place=True),
        Place((2,)),
    ),
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench/collectives.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="scenarios; 'all' for all")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each channel (default: 3)")
    parser.add_argument("--iters", type=int, help="timed iterations instead of the scenario's")
    parser.add_argument("--max-size", type=parse_size, help="cut sizes to this, for a trial")
    parser.add_argument("--no-mpi", action="store_true", help="compare with gloo alone")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder for the results")
    args = parser.parse_args(arguments)
    if args.names == ["all"]:
        args.names = list(SCENARIOS)
    unknown = [name for name in args.names if name not in SCENARIOS]
    if unknown:
        parser.error(f"there is no scenario {', '.join(unknown)}; --list names them")
    if not args.names and not args.list:
        parser.error("no scenario given; --list names them, 'all' runs all")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run scenarios; the exit status."""
    args = parse(arguments)
    console = Console()
    if args.list:
        for name, scenario in SCENARIOS.items():
            console.print(f"{name:<20} {scenario.about}", highlight=False)
        return 0
    failed = []
    for name in args.names:
        console.print(f"[bold]{name}[/bold]: {SCENARIOS[name].about}", highlight=False)
        try:
            run(name, args, console)
        except (BenchError, RuntimeError) as error:
            console.print(f"{name}: {error}", style="red", markup=False)
            failed.append(name)
    return 1 if failed else 0


def run(name: str, args: argparse.Namespace, console: Console) -> None:
    """One scenario: measure, write, print. Raises BenchError or RuntimeError."""
    scenario = SCENARIOS[name]
    peers = ("gloo",) if args.no_mpi or not _has_mpi(console) else ("gloo", "mpi")
    config = dataclasses.replace(scenario.config, rounds=args.rounds, peers=peers)
    if args.iters is not None:
        config = dataclasses.replace(config, iters=args.iters, min_seconds=0.0)
    if args.max_size is not None:
        cut = tuple(dict.fromkeys(min(size, args.max_size) for size in config.sizes))
        config = dataclasses.replace(config, sizes=cut)
    report = launch(config, scenario.place, ["python", *sys.argv])
    report["scenario"] = {"name": name, "about": scenario.about}
    path = args.out / f"{name}.json"
    write_json(report, str(path))
    print_report(console, report)
    console.print(f"written to {path}", highlight=False)


def _has_mpi(console: Console) -> bool:
    if importlib.util.find_spec("mpi4py") is None:
        console.print("mpi4py is not installed: gloo is the only peer", style="yellow")
        return False
    try:
        find_mpirun()
    except BenchError as error:
        console.print(f"gloo is the only peer: {error}", style="yellow", markup=False)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
