"""What a command says while one waits for it: on stderr, where that is a terminal and rich is installed; else nothing.

Results are no progress: they go to stdout, and are never mixed with what is drawn here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any, TypeVar

Item = TypeVar("Item")


def followed(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """The items, with a bar while they come.

    Args:
        items: anything.
        total: int, how many there will be.
        what: str, what they are, before the bar.

    Returns:
        an iterator over the items. Print nothing while it runs.
    """
    columns = columns_of_terminal()
    if columns is None:
        yield from items
        return
    bar = columns.BarColumn(), columns.MofNCompleteColumn(), columns.TimeElapsedColumn(), columns.TimeRemainingColumn()
    with progress(columns, columns.TextColumn("{task.description}"), *bar) as shown:
        yield from shown.track(items, total=total, description=what)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A sign that something goes on, and for how long already; what is printed to stdout meanwhile comes at the end.

    Args:
        what: str, what one waits for.

    Returns:
        a context.
    """
    columns = columns_of_terminal()
    if columns is None:
        yield
        return
    printed = StringIO()
    try:
        with (
            progress(
                columns, columns.SpinnerColumn(), columns.TextColumn("{task.description}"), columns.TimeElapsedColumn()
            ) as shown,
            redirect_stdout(printed),
        ):
            shown.add_task(what, total=None)
            yield
    finally:
        sys.stdout.write(printed.getvalue())


def columns_of_terminal() -> Any:
    """rich's columns, or None where nothing is to be shown."""
    if not sys.stderr.isatty():
        return None
    try:
        import rich.progress
    except ImportError:  # a command that has tables says so itself; the others do without
        return None
    return rich.progress


def progress(columns: Any, *shown: Any) -> Any:
    """A display that leaves nothing behind. It is drawn seldom: a benchmark may be running beside it."""
    from rich.console import Console

    console = Console(stderr=True)
    return columns.Progress(*shown, console=console, transient=True, refresh_per_second=4, redirect_stdout=False)
