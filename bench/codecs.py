"""The project's own measurement of the codec kernels: every row, codec and type at the sizes of
interest, from a cache's to far beyond it.

    python bench/codecs.py [--rounds 15] [--max-size 64M] [--rows v4] [--out FILE]

Leaves ``bench/results/codecs.json``, as ``qcoll bench codec --json`` writes it. One thread; a
machine that does nothing else gives narrow spreads.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from qcoll.bench import BenchError, parse_size, write_json
from qcoll.bench.codec import CODECS
from qcoll.bench.codec_report import codec_report, print_codec_report

# In the first-level cache with its output, in the second, in the last, and in memory alone.
SIZES = tuple(parse_size(text) for text in ("16K", "256K", "4M", "64M", "256M"))
DTYPES = ("fp32", "bf16", "fp16")


def main() -> int:
    """Measure, print, write; the exit status."""
    parser = argparse.ArgumentParser(prog="bench/codecs.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=15, help="turns of each kernel (default: 15)")
    parser.add_argument("--max-size", type=parse_size, default=SIZES[-1], help="largest size")
    parser.add_argument("--rows", nargs="*", help="rows of the kernel table (default: all)")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "codecs.json"))
    args = parser.parse_args()
    console = Console()
    sizes = [size for size in SIZES if size <= args.max_size]
    try:
        report = codec_report(args.rows, sizes, CODECS, DTYPES, args.rounds, ["python", *sys.argv])
        write_json(report, args.out)
    except BenchError as error:
        console.print(f"bench/codecs.py: {error}", style="red", markup=False)
        return 2
    print_codec_report(console, report)
    console.print(f"written to {args.out}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
