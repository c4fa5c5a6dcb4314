"""What runs the parts of CI keeps their budgets, passes exit codes on and leaves nothing running."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WITHIN = Path(__file__).parents[1] / ".ci" / "within.py"
SLEEPER = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]


def within(budget: str, *command: str, ci: str = "") -> subprocess.CompletedProcess:
    arguments = [sys.executable, str(WITHIN), budget, "a part", *command]
    return subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, "CI": ci}, timeout=50)


def is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").exists() and ") Z " in Path(f"/proc/{pid}/stat").read_text():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("ci", ["", "true"])
@pytest.mark.parametrize("code", [0, 1, 5])
def test_the_exit_code_and_the_time_are_passed_on(code, ci):
    done = within("30", sys.executable, "-c", f"raise SystemExit({code})", ci=ci)
    assert done.returncode == code
    assert done.stdout.startswith("-- a part: ") and done.stdout.endswith(f"exit code {code}\n")


@pytest.mark.parametrize("ci", ["true", "1", "yes"])
def test_in_ci_what_outruns_its_budget_is_stopped_and_fails(ci):
    done = within("1", *SLEEPER, ci=ci)
    assert done.returncode == 1
    pid, said = done.stdout.splitlines()
    assert said == "FAILED: a part outran its budget of 1 s"
    assert is_gone(int(pid))


@pytest.mark.parametrize("ci", ["", "0", "false"])
def test_elsewhere_a_budget_is_only_shown(ci):
    done = within("0", sys.executable, "-c", "pass", ci=ci)
    assert (done.returncode, "(budget in CI: 0 s)" in done.stdout) == (0, True)


def test_a_command_that_does_not_exist_is_one_sentence():
    done = within("5", "no-such-command-here")
    assert (done.returncode, done.stderr) == (127, "")
    assert done.stdout.startswith("FAILED: a part cannot start no-such-command-here (")


@pytest.mark.parametrize(("ci", "number"), [("", signal.SIGINT), ("true", signal.SIGINT), ("true", signal.SIGTERM)])
def test_an_interrupt_ends_the_command_too(ci, number):
    environment = {**os.environ, "CI": ci}
    process = subprocess.Popen(
        [sys.executable, str(WITHIN), "50", "a part", *SLEEPER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        start_new_session=True,
    )
    pid = int(process.stdout.readline())
    os.killpg(process.pid, number)  # as a terminal does: everything in its session
    assert process.wait(timeout=20) != 0
    assert is_gone(pid)
