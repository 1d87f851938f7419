"""The day that chat templates write into prompts: that on which the run began, also where it goes on later."""

from datetime import datetime


class Day:
    """The time at which this process began, then that at which its run began, maybe in another process."""

    def __init__(self) -> None:
        self._began = datetime.now().astimezone()

    def begin(self) -> None:
        self._began = datetime.now().astimezone()

    def go_on(self, day: str) -> None:
        """Take the day of a checkpoint, "" if that was written before days were kept."""
        if day:
            self._began = datetime.fromisoformat(day)

    def __str__(self) -> str:
        return self._began.isoformat(timespec="seconds")

    def strftime(self, form: str) -> str:
        """Return the day as text; chat templates call this as `strftime_now`."""
        return self._began.strftime(form)


DAY = Day()
