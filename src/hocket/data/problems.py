"""What is wrong with the rows of a source, collected so that one message names several of them."""

from hocket.errors import DataError

NUM_SHOWN = 5


class Problems:
    """Collects offending rows.

    Args:
        source: the data source, as the message names it.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._shown: list[str] = []
        self._rows: set[str] = set()

    def add(self, where: str, what: str) -> None:
        """Notes that the row at `where` (file and line) can't be used because of `what`."""
        self._rows.add(where)
        if len(self._shown) < NUM_SHOWN:
            self._shown.append(f"{where}: {what}")

    def refuse(self, num_rows: int) -> None:
        """Raises DataError with the first offenders and their number, if there are any."""
        if not self._rows:
            return
        lines = [f"{len(self._rows)} of {num_rows} rows of {self._source} can't be used; repair or remove them:"]
        lines += [f"  {line}" for line in self._shown]
        if len(self._rows) > len(self._shown):
            lines.append(f"  ... and {len(self._rows) - len(self._shown)} more")
        raise DataError("\n".join(lines))
