"""Run a command and print how long it took: `within.py SECONDS NAME COMMAND...`.

With CI=true a command that outruns its budget is stopped and the run fails, so that later work keeps the budget.
"""

import os
import signal
import subprocess
import sys
import time


def main(budget_s: int, name: str, command: list[str]) -> int:
    enforced = os.environ.get("CI", "").lower() in {"1", "true"}
    start = time.monotonic()
    process = subprocess.Popen(command, start_new_session=enforced)
    try:
        code = process.wait(timeout=budget_s if enforced else None)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        print(f"FAILED: {name} outran its budget of {budget_s} s", flush=True)
        return 1
    except KeyboardInterrupt:
        return process.wait()
    print(f"-- {name}: {time.monotonic() - start:.0f} s (budget in CI: {budget_s} s), exit code {code}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
