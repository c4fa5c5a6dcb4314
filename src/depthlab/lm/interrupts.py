"""Ctrl-C that waits for the end of a step."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def finish_step_on_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Ctrl-C inside only makes the yielded function true; a second one raises KeyboardInterrupt at once."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():  # only there may signals be handled
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
