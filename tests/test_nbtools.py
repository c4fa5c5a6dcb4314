"""Notebooks run in fresh kernels, come out the same every time, and name the cell that fails."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import depthlab as dl
from depthlab import nbtools
from depthlab.nbtools.execute import execute, nbval_flags
from depthlab.nbtools.session import outside_tested_range

EXECUTE = sys.modules["depthlab.nbtools.execute"]  # the module; `execute` is its function

ROOT = Path(__file__).parents[1]
SANITIZE = ROOT / "notebooks" / "nbval.cfg"


def save(
    path: Path, *cells: str, outputs: dict[int, str] | None = None, tags: dict[int, list[str]] | None = None
) -> Path:
    """A notebook of code cells (text cells begin with "#md"); `outputs` are what their streams hold by cell."""
    made = []
    for i, source in enumerate(cells):
        metadata = {"tags": (tags or {}).get(i, [])}
        if source.startswith("#md"):
            made.append({"cell_type": "markdown", "metadata": {}, "source": source[3:]})
            continue
        printed = (outputs or {}).get(i)
        streams = [{"output_type": "stream", "name": "stdout", "text": printed}] if printed else []
        count = None if outputs is None else i + 1
        made.append(
            {"cell_type": "code", "metadata": metadata, "source": source, "outputs": streams, "execution_count": count}
        )
    nbtools.write(nbtools.normalise({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}), path)
    return path


# ---- start ----------------------------------------------------------------------------------------------------------


def test_start_prints_one_line_that_the_sanitising_rule_covers(capsys):
    import re

    session = dl.start(seed=3)
    line = capsys.readouterr().out
    assert line.count("\n") == 1 and line.startswith(f"depthlab {dl.__version__} | Python 3.")
    rules = re.findall(r"^regex: (.*)$\n^replace: (.*)$", SANITIZE.read_text(), re.MULTILINE)
    assert len(rules) == 1 and re.sub(*rules[0], line) == "SESSION | quick mode\n"
    assert session.device.type == "cpu" and not session.full


def test_sanitising_leaves_numbers_and_the_mode_alone():
    import re

    ((rule, replacement),) = re.findall(r"^regex: (.*)$\n^replace: (.*)$", SANITIZE.read_text(), re.MULTILINE)
    for line in ("PASS  the gap is 0.30000000000000004", "loss 1.25 | accuracy 0.9", "depthlab 0.1.0 | torch"):
        assert re.sub(rule, replacement, line) == line


def test_start_seeds_every_source_of_randomness():
    import random

    import numpy as np
    import torch

    draws = []
    for seed in (5, 5, 6):
        session = dl.start(seed=seed)
        numbers = torch.rand(1, generator=session.generator), torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002
        draws.append(tuple(float(x) for x in numbers))
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[1], draws[2], strict=True))


def test_full_mode_is_asked_for_by_one_variable(monkeypatch):
    monkeypatch.setenv("DEPTHLAB_FULL", "1")
    assert dl.start(seed=0).full
    monkeypatch.setenv("DEPTHLAB_FULL", "yes")
    with pytest.raises(ValueError, match="DEPTHLAB_FULL is 'yes'; set it to 1"):
        dl.start(seed=0)


@pytest.mark.parametrize(
    ("installed", "sentence"),
    [
        ({"python": "3.11.0", "torch": "2.9.0+cpu", "numpy": "2.0"}, None),
        ({"python": "3.14.0", "torch": "2.15.0a0+git", "triton": "1.0"}, None),
        ({"python": "3.10.4", "torch": "2.9.0"}, "depthlab is tested with python >=3.11 and found 3.10.4; "),
        ({"python": "3.12.1", "torch": "2.8.1"}, "depthlab is tested with torch >=2.9 and found 2.8.1; run: pip"),
    ],
)
def test_one_sentence_outside_the_tested_range(installed, sentence):
    requirements = ["torch>=2.9", "numpy>=1.26", "triton>=3.5; sys_platform == 'linux'", 'pytest; extra == "dev"']
    said = outside_tested_range(installed, ">=3.11", requirements)
    assert said is None if sentence is None else said.startswith(sentence)


def test_start_refuses_an_old_torch(monkeypatch):
    import importlib.metadata

    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.1.0" if name == "torch" else version(name))
    with pytest.raises(RuntimeError, match="torch >=2.9 and found 2.1.0; run: pip install --upgrade 'torch>=2.9'"):
        dl.start(seed=0)


# ---- run ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_failures_name_their_cell_and_the_rest_still_runs(tmp_path, capsys):
    check = "import depthlab as dl\ndl.check('two is under one', 2, '<', 1)"
    paths = [
        save(tmp_path / "01_dead.ipynb", "x = 1", "import os\nos._exit(1)", "x"),
        save(tmp_path / "02_false.ipynb", "x = 1", check),
        save(tmp_path / "03_hangs.ipynb", "import time\ntime.sleep(60)"),
        save(tmp_path / "04_noisy.ipynb", "import sys\nprint('old api', file=sys.stderr)"),
        save(tmp_path / "05_good.ipynb", "#md text", "import depthlab as dl\ndl.check('one is one', 1, '==', 1)"),
    ]
    before = time.monotonic()
    code = nbtools.run(paths, out_dir=tmp_path / "out", cell_timeout=12)
    assert code == 1 and time.monotonic() - before < 60 + 12
    dead, false, hangs, noisy, good, total = capsys.readouterr().out.splitlines()
    assert dead.startswith("FAILED  01_dead.ipynb, cell c02: the kernel died")
    assert false == "FAILED  02_false.ipynb, cell c02: CheckFailed: two is under one: expected < 1, got 2."
    assert hangs == "FAILED  03_hangs.ipynb, cell c01: took over 12 s and was stopped"
    assert noisy == "FAILED  04_noisy.ipynb, cell c01: writes to stderr: old api"
    assert good.startswith("ok      05_good.ipynb") and "1 checks passed" in good and good.endswith("GB")
    assert total.startswith("1 of 5 notebooks ran to the end, 1 checks passed")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [path.name for path in paths]


def test_running_in_place_twice_gives_the_same_bytes_and_keeps_a_failing_file(tmp_path):
    good = save(tmp_path / "01_good.ipynb", "#md # T", "print(1)\nprint(2)", "3")
    assert nbtools.run([good], in_place=True) == 0
    first = good.read_bytes()
    assert nbtools.run([good], in_place=True) == 0
    assert good.read_bytes() == first and [f.name for f in tmp_path.iterdir()] == ["01_good.ipynb"]
    cells = json.loads(first)["cells"]
    assert [cell["id"] for cell in cells] == ["c01", "c02", "c03"]
    assert [cell["execution_count"] for cell in cells[1:]] == [1, 2]

    bad = save(tmp_path / "02_bad.ipynb", "1 / 0")
    before = bad.read_bytes()
    assert nbtools.run([bad], in_place=True) == 1
    assert bad.read_bytes() == before


def test_the_kernel_starts_beside_its_notebook_with_one_thread(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "deep").mkdir()
    source = "import os, sys\nprint(os.path.basename(os.getcwd()), os.environ['OMP_NUM_THREADS'], sys.executable)"
    outcome = execute(save(tmp_path / "deep" / "01_where.ipynb", source))
    assert outcome.problem is None
    assert outcome.notebook["cells"][0]["outputs"][0]["text"] == f"deep 1 {sys.executable}\n"
    assert 20e6 < outcome.peak_bytes < 500e6


def test_peak_memory_is_the_kernels_own(tmp_path):
    outcome = execute(
        save(tmp_path / "01_big.ipynb", "x = bytearray(700_000_000)\nx[::4096] = b'1' * len(x[::4096])\ndel x")
    )
    assert 0.7e9 < outcome.peak_bytes < 1.1e9


def test_normalising_leaves_only_what_was_printed():
    untidy = {
        "cells": [
            {
                "cell_type": "code",
                "id": "f00d",
                "metadata": {"execution": {"iopub": "now"}, "tags": ["solution"], "collapsed": True},
                "source": "x",
                "execution_count": 1,
                "outputs": [
                    {"output_type": "stream", "name": "stdout", "text": "a\n"},
                    {"output_type": "stream", "name": "stdout", "text": "b\n"},
                    {
                        "output_type": "display_data",
                        "metadata": {"needs_background": "light"},
                        "data": {"image/png": "AAAA", "text/plain": "<Figure size 460x310 with 1 Axes>"},
                    },
                ],
            }
        ],
        "metadata": {"kernelspec": {"name": "my-env"}, "widgets": {"state": {}}, "language_info": {"version": "3.11"}},
        "nbformat": 4,
        "nbformat_minor": 4,
    }
    before = json.dumps(untidy)
    tidy = nbtools.normalise(untidy)
    assert json.dumps(untidy) == before, "the argument is left alone"
    (cell,) = tidy["cells"]
    assert cell["id"] == "c01" and cell["metadata"] == {"tags": ["solution"]}
    stream, picture = cell["outputs"]
    assert stream["text"] == "a\nb\n" and picture == {
        "output_type": "display_data",
        "metadata": {},
        "data": {"image/png": "AAAA"},
    }
    assert (
        set(tidy["metadata"]) == {"kernelspec", "language_info"} and tidy["metadata"]["kernelspec"]["name"] == "python3"
    )
    assert nbtools.normalise(tidy) == tidy


def test_unreadable_notebooks_are_named(tmp_path):
    (tmp_path / "01_cut.ipynb").write_text('{"cells": [')
    with pytest.raises(ValueError, match="01_cut.ipynb is not a readable notebook"):
        nbtools.read(tmp_path / "01_cut.ipynb")
    with pytest.raises(ValueError, match="There is no notebook"):
        nbtools.run([tmp_path / "02_none.ipynb"])
    (tmp_path / "03_cell.ipynb").write_text('{"nbformat": 4, "metadata": {}, "cells": [{"cell_type": "code"}]}')
    with pytest.raises(ValueError, match="03_cell.ipynb: cell 1 has no type or no source"):
        nbtools.read(tmp_path / "03_cell.ipynb")


def test_a_code_cell_without_a_list_of_outputs_has_none(tmp_path):
    cell = '{"cell_type": "code", "source": ["x = 1\\n", "x"]}'
    (tmp_path / "01_bare.ipynb").write_text(f'{{"nbformat": 4, "metadata": {{}}, "cells": [{cell}]}}')
    assert nbtools.read(tmp_path / "01_bare.ipynb")["cells"][0]["outputs"] == []


def test_a_path_with_spaces_and_other_letters_runs_and_compares(tmp_path, monkeypatch, capfd):
    from depthlab.nbtools import policy

    folder = tmp_path / "my notes ü"
    folder.mkdir()
    path = save(folder / "01_two words.ipynb", "import os\nprint(os.path.basename(os.getcwd()), 'é ∑')")
    assert nbtools.run([path], in_place=True) == 0
    assert nbtools.read(path)["cells"][0]["outputs"][0]["text"] == "my notes ü é ∑\n"
    monkeypatch.setattr(policy, "problems", lambda path: [])
    assert nbtools.check([path], cell_timeout=30) == 0 and "1 passed" in capfd.readouterr().out


# ---- strict nbval ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_strict_run_stops_at_a_dead_kernel_and_compares_floats_to_the_last_digit(tmp_path):
    paths = [
        save(tmp_path / "01_dead.ipynb", "x = 1", "import os\nos._exit(1)", "x = 2", outputs={}),
        save(tmp_path / "02_same.ipynb", "print(0.1 + 0.2)", outputs={0: "0.30000000000000004\n"}),
        save(tmp_path / "03_one_ulp.ipynb", "print(0.1 + 0.2)", outputs={0: "0.3\n"}),
    ]
    cell_timeout = 10
    flags = [*nbval_flags(ROOT / "notebooks", cell_timeout), "--color=no", "-rA"]
    command = [sys.executable, "-m", "pytest", *flags, *map(str, paths)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60 + cell_timeout)
    assert done.returncode == 1
    for line in (
        "PASSED 01_dead.ipynb::Cell 0",
        "FAILED 01_dead.ipynb::Cell 1",
        "XFAIL 01_dead.ipynb::Cell 2",
        "PASSED 02_same.ipynb::Cell 0",
        "FAILED 03_one_ulp.ipynb::Cell 0",
    ):
        assert line in done.stdout, done.stdout


def test_check_judges_policy_and_outputs_and_accepts_no_code(tmp_path, monkeypatch, capsys):
    from depthlab.nbtools import policy

    path = save(tmp_path / "01_text.ipynb", "#md only text")
    monkeypatch.setattr(policy, "problems", lambda path: [])
    assert nbtools.check([path]) == 0
    monkeypatch.setattr(policy, "problems", lambda path: ["01_text.ipynb: no title"])
    assert nbtools.check([path]) == 1 and "no title" in capsys.readouterr().out


def test_check_runs_the_strict_comparison_with_the_policy(tmp_path, monkeypatch):
    from depthlab.nbtools import policy

    path = save(tmp_path / "01_code.ipynb", "x = 1")
    calls = []
    monkeypatch.setattr(policy, "problems", lambda path: [])
    monkeypatch.setattr(EXECUTE, "compare", lambda command, env: calls.append((command, env)) or (3, True))
    assert nbtools.check([path]) == 3
    ((command, env),) = calls
    assert command[1:3] == ["-m", "pytest"] and command[-1] == str(path) and "--nbval" in command
    assert env["OMP_NUM_THREADS"]


def test_flags_are_strict():
    flags = " ".join(nbval_flags(ROOT / "notebooks"))
    assert "--nbval " in flags and "--nbval-current-env" in flags and "--nbval-cell-timeout=120" in flags
    assert "-n 2 --dist loadscope" in flags and "--nbval-lax" not in flags and "nbval.cfg" in flags


def test_a_notebook_on_triton_is_left_out_in_a_sentence_where_there_is_none(tmp_path, monkeypatch, capsys):
    import importlib.util

    from depthlab.nbtools import policy

    first = "#md" + FIRST.replace("**Needs** CPU", "**Needs** CPU and triton (Linux)")
    path = save(tmp_path / "01_kernels.ipynb", first, "raise SystemExit('ran')")
    other = save(tmp_path / "02_other.ipynb", "#md" + FIRST, "x = 1")
    before = path.read_bytes()
    spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "triton" else spec(name, *a))
    sentence = "skipped 01_kernels.ipynb needs triton, which is not installed here (it exists for Linux only)"
    assert nbtools.run([path], in_place=True) == 0
    assert capsys.readouterr().out.splitlines()[0] == sentence and path.read_bytes() == before
    ran = []
    monkeypatch.setattr(policy, "problems", lambda path: [])
    monkeypatch.setattr(EXECUTE, "compare", lambda command, env: ran.append(command) or (0, True))
    assert nbtools.check([path, other]) == 0 and sentence in capsys.readouterr().out
    assert str(other) in ran[0] and str(path) not in ran[0]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: object())
    assert nbtools.cannot_run(path) is None, "where triton is, it runs"


# ---- headers --------------------------------------------------------------------------------------------------------

NEEDS = (
    "**Needs** CPU · **Time** 1.5 min (full mode 12 min on one GPU) · **Memory** 0.6 GB · **Download** none · "
    "**Read first** [00](00.ipynb)"
)
FIRST = f"# 01 · A bound\n\n*Does it hold?*\n\n{NEEDS}"


def test_header_is_read(tmp_path):
    head = nbtools.header(save(tmp_path / "01_bound.ipynb", f"#md{FIRST}"))
    assert head[:3] == ("01", "A bound", "Does it hold?") and head.seconds == 90
    assert (head.full_time, head.memory, head.before) == ("12 min on one GPU", "0.6 GB", "[00](00.ipynb)")


def test_a_missing_part_of_the_header_is_named(tmp_path):
    path = save(tmp_path / "01_bound.ipynb", "#md" + FIRST.replace("· **Memory** 0.6 GB ", ""))
    with pytest.raises(ValueError, match=r"lacks the line `\*\*Needs\*\* CPU"):
        nbtools.header(path)
    with pytest.raises(ValueError, match="must be text"):
        nbtools.header(save(tmp_path / "02_code.ipynb", "x = 1"))


def test_readme_table_is_filled_between_its_marks(tmp_path):
    (tmp_path / "notebooks").mkdir()
    save(tmp_path / "notebooks" / "01_bound.ipynb", f"#md{FIRST}")
    readme = tmp_path / "README.md"
    readme.write_text("# T\n\n<!-- generated: notebooks -->\nold\n<!-- end: notebooks -->\n\nrest\n")
    assert nbtools.write_readme_table(readme, check=True) is False and "old" in readme.read_text()
    assert nbtools.write_readme_table(readme) is False
    row = "| 01 | [A bound](notebooks/01_bound.ipynb) | Does it hold? | 1.5 min (full: 12 min on one GPU) | 0.6 GB |"
    text = readme.read_text()
    assert row in text and "\nold\n" not in text and text.endswith("\n\nrest\n")
    assert nbtools.write_readme_table(readme, check=True) is True
    readme.write_text("# T\n")
    with pytest.raises(ValueError, match="must hold one line"):
        nbtools.write_readme_table(readme)


def test_colab_links_follow_the_configured_address(tmp_path):
    path = save(tmp_path / "01_bound.ipynb", f"#md{FIRST}")
    before = path.read_bytes()
    nbtools.sync_colab([path], address="https://github.com/owner/name")
    link = "[Open in Colab](https://colab.research.google.com/github/owner/name/blob/main/notebooks/01_bound.ipynb)"
    assert nbtools.read(path)["cells"][0]["source"] == f"{FIRST}\n\n{link}"
    moved = path.rename(tmp_path / "02_bound.ipynb")
    nbtools.sync_colab([moved], address="https://github.com/owner/name")
    assert nbtools.read(moved)["cells"][0]["source"].endswith("notebooks/02_bound.ipynb)")
    nbtools.sync_colab([moved], address="")
    assert moved.read_bytes() == before


# ---- the hook file --------------------------------------------------------------------------------------------------


def test_hook_file_leaves_student_copies_out_and_quietens_the_kernels(monkeypatch):
    import importlib.util

    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "2"})
    spec = importlib.util.spec_from_file_location("notebooks_conftest", ROOT / "notebooks" / "conftest.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    assert hook.collect_ignore_glob == ["exercises/*"]
    assert os.environ == {**nbtools.KERNEL_ENV, "OMP_NUM_THREADS": "2"}, "what the caller asks for stays"


@pytest.mark.parametrize(("text", "runs"), [("Kernel didn't respond in 60 seconds", 2), ("1 failed", 1)])
def test_a_comparison_is_repeated_once_where_a_kernel_did_not_start_and_nowhere_else(
    tmp_path, monkeypatch, capsys, text, runs
):
    from depthlab.nbtools import policy

    path = save(tmp_path / "01_code.ipynb", "x = 1")
    monkeypatch.setattr(policy, "problems", lambda path: [])
    real, ran = EXECUTE.compare, []
    script = [sys.executable, "-c", f"print({text!r}); raise SystemExit(3)"]
    monkeypatch.setattr(EXECUTE, "compare", lambda command, env: ran.append(command) or real(script, env))
    assert nbtools.check([path]) == 3 and len(ran) == runs
    assert capsys.readouterr().out.count(text) == runs
