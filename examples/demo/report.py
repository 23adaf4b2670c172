"""What the runs say next to each other: numbers as JSON, a table, a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

#: What a rank program wrote, see :func:`examples.demo.train.main`.
Result = dict[str, Any]

_COLOURS = ("#6b6b6b", "#1b7837", "#762a83", "#b35806")
_NOT_MEASURED = "-"


def compare(results: Mapping[str, Result], losses: Mapping[str, npt.NDArray[Any]]) -> Result:
    """Every run against the first one, the baseline.

    Args:
        results: by the run's name.
        losses: validation loss per held-out window, for the runs that went to the end.

    Returns ``communication_share`` of the baseline's step, c; and for every other run the ratio of
    its bytes across nodes to the baseline's, how many times faster its step is, the ceiling
    1 / (1 - c + c * ratio) for that speed-up if communication time went with the bytes, the ratio
    of its bytes to those of the run of the same name plus " exact", and the difference in
    validation loss with its standard error over the windows. What was not measured is None.
    """
    name, baseline = next(iter(results.items()))
    whole, free = baseline["step"]["seconds"], baseline["seconds_without_communication"]
    share = max(0.0, 1 - free / whole)
    runs: dict[str, Any] = {}
    for other, result in results.items():
        if other == name:
            continue
        ratio = _divide(bytes_across(result), bytes_across(baseline))
        difference = _paired(losses.get(other), losses.get(name))
        steps = min(len(result["train_losses"]), len(baseline["train_losses"]))
        drift = np.subtract(result["train_losses"][:steps], baseline["train_losses"][:steps])
        runs[other] = {
            "bytes_ratio": ratio,
            "bytes_ratio_to_exact": _divide(
                bytes_across(result), bytes_across(results.get(f"{other} exact", {}))
            ),
            "speedup": whole / result["step"]["seconds"],
            "ceiling": None if ratio is None else 1 / (1 - share + share * ratio),
            "loss_difference": difference[0],
            "loss_difference_error": difference[1],
            "largest_training_loss_difference": float(np.abs(drift).max()),
        }
    return {"baseline": name, "communication_share": share, "runs": runs}


def bytes_across(result: Result) -> float | None:
    """Bytes per step that crossed nodes: by interface counters, else as qcoll counted them."""
    step = result.get("step", {})
    counted: float | None = step.get("interface_bytes")
    return counted if counted is not None else step.get("library", {}).get("across_nodes")


def print_table(console: Console, report: Result) -> None:
    """The comparison as a table, one column per run, and what to make of it."""
    results: Mapping[str, Result] = report["runs"]
    comparison = report["comparison"]
    table = Table(title=report["title"], title_justify="left")
    table.add_column("per training step")
    for name in results:
        table.add_column(name, justify="right")

    def row(label: str, cells: Sequence[str]) -> None:
        table.add_row(label, *cells)

    runs = list(results.values())
    against = [comparison["runs"].get(name, {}) for name in results]
    row("steps measured", [str(run["step"]["measured_steps"]) for run in runs])
    row("validation loss, nats/char", [_number(run["validation_loss"], ".4f") for run in runs])
    row("  difference", [_difference(entry) for entry in against])
    row("step time", [f"{run['step']['seconds'] * 1e3:.0f} ms" for run in runs])
    row("  times faster", [_number(entry.get("speedup"), ".2f") for entry in against])
    row("payload of collectives", [_megabytes(sum(run["payload"].values())) for run in runs])
    row("bytes across nodes", [_megabytes(bytes_across(run)) for run in runs])
    row("  ratio", [_number(entry.get("bytes_ratio"), ".3f") for entry in against])
    row(
        "  ratio to exact", [_number(entry.get("bytes_ratio_to_exact"), ".3f") for entry in against]
    )
    row(
        "step without communication",
        [f"{run['seconds_without_communication'] * 1e3:.0f} ms" for run in runs],
    )
    console.print(table)
    for line in explanations(report):
        console.print(line, highlight=False)


def explanations(report: Result) -> list[str]:
    """Sentences that go below the table: the ceiling, and where the bytes were counted."""
    comparison = report["comparison"]
    share, baseline = comparison["communication_share"], comparison["baseline"]
    lines = [f"Communication is {share:.0%} of {baseline}'s step."]
    for name, entry in comparison["runs"].items():
        if entry["ceiling"] is not None:
            line = (
                f"With communication time in proportion to bytes, {name}'s step would be "
                f"1 / (1 - {share:.3f} + {share:.3f} x {entry['bytes_ratio']:.3f}) = "
                f"{entry['ceiling']:.2f} times faster; it is {entry['speedup']:.2f} times faster"
            )
            more = entry["speedup"] > entry["ceiling"]
            lines.append(line + (": it also needs less time per byte." if more else "."))
    if report["hosts"]:
        lines.append("Bytes across nodes: what the interfaces of the two nodes sent, by counters.")
    else:
        lines.append(
            f"The nodes shared one network: {report['why_no_hosts']}. Nothing limited the link and "
            "interface counters could not tell nodes apart; bytes across nodes are qcoll's own "
            "count, and unknown for other backends."
        )
    return lines


def draw(report: Result, path: Path) -> None:
    """Loss by step, loss by time, and bytes per step, as one PNG."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    by_step, by_time, by_bytes = figure.subplots(1, 3)
    runs: Mapping[str, Result] = report["runs"]
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(runs)}
    for index, (name, run) in enumerate(runs.items()):
        if run["validation_loss"] is not None:
            # Curves that lie on each other: the baseline as a line, the others as dashes on it.
            style = "o-" if index == 0 else "s--"
            _draw_losses(by_step, by_time, run, style, name, colours[name])
    by_step.set(title="same steps", xlabel="training step", ylabel="loss, nats per character")
    by_time.set(title="same time", xlabel="seconds of training", ylabel="validation loss")
    by_step.legend(frameon=False)
    _draw_bytes(by_bytes, runs, colours)
    figure.suptitle(report["title"])
    figure.savefig(path, dpi=130)


def _draw_losses(
    by_step: Axes, by_time: Axes, run: Result, style: str, name: str, colour: str
) -> None:
    losses = run["train_losses"]
    steps = np.arange(1, len(losses) + 1)
    by_step.plot(steps, losses, color=colour, alpha=0.25, linewidth=1)
    points = np.array(run["validation_curve"])
    by_step.plot(points[:, 0], points[:, 1], style, color=colour, markersize=4, label=name)
    seconds = points[:, 0] * run["step"]["seconds"]
    by_time.plot(seconds, points[:, 1], style, color=colour, markersize=4, label=name)


def _draw_bytes(axes: Axes, runs: Mapping[str, Result], colours: Mapping[str, str]) -> None:
    axes.set(title="bytes across nodes per step", ylabel="MB")
    for position, (name, run) in enumerate(runs.items()):
        across = bytes_across(run)
        axes.bar(position, (across or 0) / 1e6, color=colours[name])
        size = "not measured" if across is None else f"{across / 1e6:.2f} MB"
        label = f"{size}\n{run['step']['seconds'] * 1e3:.0f} ms/step"
        axes.annotate(label, (position, (across or 0) / 1e6), ha="center", va="bottom")
    axes.set_xticks(range(len(runs)), list(runs))
    axes.margins(y=0.2)


def write_json(report: Result, path: Path) -> None:
    """All numbers of the report."""
    path.write_text(json.dumps(report, indent=1) + "\n")


def _paired(
    losses: npt.NDArray[Any] | None, baseline: npt.NDArray[Any] | None
) -> tuple[float | None, float | None]:
    """Mean difference over the same windows, and its standard error."""
    if losses is None or baseline is None:
        return None, None
    difference = losses.astype(np.float64) - baseline.astype(np.float64)
    return float(difference.mean()), float(difference.std() / np.sqrt(len(difference)))


def _divide(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by


def _number(value: float | None, form: str) -> str:
    return _NOT_MEASURED if value is None else format(value, form)


def _difference(entry: Mapping[str, Any]) -> str:
    if entry.get("loss_difference") is None:
        return _NOT_MEASURED
    return f"{entry['loss_difference']:+.4f} ± {entry['loss_difference_error']:.4f}"


def _megabytes(value: float | None) -> str:
    return _NOT_MEASURED if value is None else f"{value / 1e6:.3f} MB"
