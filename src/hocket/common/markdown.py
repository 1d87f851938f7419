"""Write tables as Markdown."""

from collections.abc import Iterable


def table(header: tuple[str, ...], rows: Iterable[Iterable[object]]) -> str:
    lines = [f"| {' | '.join(map(str, row))} |" for row in (header, *rows)]
    lines.insert(1, "|---" * len(header) + "|")
    return "\n".join(lines)
