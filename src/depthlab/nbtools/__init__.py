"""Notebooks: start a session, execute, check and normalise them, describe them, cut exercises out of them.

Reading needs only the standard library; executing needs the extra ``depthlab[notebooks]``, checking ``depthlab[dev]``.
"""

from depthlab.nbtools.document import find, normalise, read, write
from depthlab.nbtools.execute import KERNEL_ENV, check, run
from depthlab.nbtools.exercises import student_copy, write_exercises
from depthlab.nbtools.headers import Header, cannot_run, header, readme_table, sync_colab, write_readme_table
from depthlab.nbtools.session import Start, outside_tested_range, start

__all__ = [
    "KERNEL_ENV",
    "Header",
    "Start",
    "cannot_run",
    "check",
    "find",
    "header",
    "normalise",
    "outside_tested_range",
    "read",
    "readme_table",
    "run",
    "start",
    "student_copy",
    "sync_colab",
    "write",
    "write_exercises",
    "write_readme_table",
]
