"""The day that chat templates write into prompts: that on which the run began, also where it goes on later."""

from datetime import datetime


class Day:
    """Begins with the process; a run begins it anew, or goes on with that of its checkpoint."""

    def __init__(self) -> None:
        self._began = datetime.now().astimezone()

    def begin(self) -> None:
        self._began = datetime.now().astimezone()

    def go_on(self, day: str) -> None:
        """Take the day that a checkpoint has; "": one that was written before days were kept."""
        if day:
            self._began = datetime.fromisoformat(day)

    def __str__(self) -> str:
        return self._began.isoformat(timespec="seconds")

    def strftime(self, form: str) -> str:
        """Return the day in a form, as the function `strftime_now` of templates does."""
        return self._began.strftime(form)


DAY = Day()
