"""From a folder to what is known of the run in it, kept up to date."""

from collections.abc import Callable

from flopwatch.cli.watch_state import WatchedRun
from flopwatch.run_log import LogFollower, NoLogError, find_log


class WatchFeed:
    """Looks at a run's log whenever asked. The folder, the log and its first record may all come later.

    Attributes:
        run: What is known.
        place: What is watched, as the user wrote it.
    """

    def __init__(self, run_dir: str, unix_time: Callable[[], float]) -> None:
        self.run = WatchedRun()
        self.place = run_dir
        self.unix_time = unix_time
        self._follower: LogFollower | None = None
        self._replaced = 0
        self._has_looked = False

    def look(self, *, must_exist: bool = False) -> None:
        """Take in what is new.

        Raises:
            InputError: There are several logs, or one in a newer format; with `must_exist` also where there is none.
        """
        if self._follower is None:
            try:
                self._follower = LogFollower(find_log(self.place))
            except NoLogError:
                if must_exist:
                    raise
                return
        records = self._follower.poll()
        if self._follower.times_replaced > self._replaced:
            self._replaced = self._follower.times_replaced
            self.run = WatchedRun()
        is_new = False
        for record in records:
            self.run.add(record)
            is_new = True
        if is_new and self._has_looked:
            # By the clock here: the one of the training's machine may differ.
            self.run.heard_unix_time = self.unix_time()
        self._has_looked = True
