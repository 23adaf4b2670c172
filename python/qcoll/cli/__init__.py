"""The command ``qcoll``; also ``python -m qcoll.cli``."""

from __future__ import annotations


def main() -> None:
    """Run the command line of this process, and exit."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        raise SystemExit(
            f"qcoll's command line needs typer and rich ({error}); pip install 'qcoll[cli]'"
        ) from error
    from qcoll.cli.app import app

    app()
