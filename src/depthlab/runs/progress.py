"""Plain progress lines for work that takes over 10 s; none inside CI."""

import os
import threading
import time
from types import TracebackType

_QUIET_FOR_S = 10.0
_HEARTBEAT_S = 60.0


def in_ci() -> bool:
    """True where the environment variable CI is set (and not 0 or false); then nothing shows progress."""
    return os.environ.get("CI", "").strip().lower() not in ("", "0", "false")


class Progress:
    """Counts finished pieces of work; speaks from the tenth second on, and once a minute while a piece takes long."""

    def __init__(self, name: str, done: int, total: int) -> None:
        self.name, self.done, self.total = name, done, total
        self._start = time.monotonic()
        self._over = threading.Event()
        self._speaking = False
        self._thread = threading.Thread(target=self._heartbeat, daemon=True)

    def __enter__(self) -> "Progress":
        if not in_ci():
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()

    def finished(self, piece: str, seconds: float) -> None:
        """One more piece is done."""
        self.done += 1
        if self._speaking:
            self._say(f", finished {piece} in {seconds:.0f} s")

    def _heartbeat(self) -> None:
        pause = _QUIET_FOR_S
        while not self._over.wait(pause):
            self._speaking = True
            self._say("")
            pause = _HEARTBEAT_S

    def _say(self, what: str) -> None:
        seconds = time.monotonic() - self._start
        print(f"{self.name}: {self.done} of {self.total} cells after {seconds:.0f} s{what}", flush=True)
