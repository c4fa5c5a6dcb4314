"""Run a command and print how long it took: `within.py SECONDS NAME COMMAND...`.

With CI=true a command that outruns its budget is stopped and the run fails, so that later work keeps the budget.
"""

import os
import signal
import subprocess
import sys
import time


def main(budget_s: int, name: str, command: list[str]) -> int:
    # Also used before anything is installed, so this cannot ask depthlab.runs.in_ci.
    enforced = os.environ.get("CI", "").strip().lower() not in ("", "0", "false")
    start = time.monotonic()
    if enforced:  # the command gets a session of its own, which neither Ctrl-C nor the end of this process reaches
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, start_new_session=enforced)
    except OSError as error:
        print(f"FAILED: {name} cannot start {command[0]} ({error.strerror}); run `make install`.", flush=True)
        return 127
    try:
        code = process.wait(timeout=budget_s if enforced else None)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        print(f"FAILED: {name} outran its budget of {budget_s} s", flush=True)
        return 1
    except KeyboardInterrupt:
        if enforced:
            os.killpg(process.pid, signal.SIGINT)
        return process.wait()
    print(f"-- {name}: {time.monotonic() - start:.0f} s (budget in CI: {budget_s} s), exit code {code}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
