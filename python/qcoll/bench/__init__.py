"""Measures qcoll's collectives, checked for correctness, next to gloo and MPI.

The command line is ``qcoll bench`` (:mod:`qcoll.cli`); a program calls :func:`launch`, which starts
ranks and returns a report, or, when it is a rank already, :func:`join` and :func:`measure`.
"""

from qcoll.bench.config import BenchError, Config, Place, parse_size, sizes
from qcoll.bench.launch import launch
from qcoll.bench.measure import measure
from qcoll.bench.rendezvous import join, launcher
from qcoll.bench.results import Report, read_report, write_csv, write_json
from qcoll.bench.statistics import bus_factor

__all__ = [
    "BenchError",
    "Config",
    "Place",
    "Report",
    "bus_factor",
    "join",
    "launch",
    "launcher",
    "measure",
    "parse_size",
    "read_report",
    "sizes",
    "write_csv",
    "write_json",
]
