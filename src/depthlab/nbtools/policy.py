"""What a committed notebook must be: small rules, ``rule(notebook, path) -> list of complaints``, gathered here.

nbval compares outputs; these rules hold what it does not see. Every rule is tested with a notebook that it alone
rejects (tests/test_notebook_policy.py).
"""

from collections.abc import Callable
from pathlib import Path

from depthlab.nbtools import rules_code, rules_outputs, rules_text
from depthlab.nbtools.document import Notebook, read

Rule = Callable[[Notebook, Path], list[str]]


def problems(path: str | Path) -> list[str]:
    """Everything that the rules hold against one notebook, as lines that begin with its name."""
    path = Path(path)
    notebook = read(path)
    return [f"{path.name}: {complaint} [{rule.__name__}]" for rule in RULES for complaint in rule(notebook, path)]


RULES: tuple[Rule, ...] = (
    rules_text.header_is_complete,
    rules_text.colab_link_matches,
    rules_text.sections_in_order,
    rules_text.notation_is_a_table,
    rules_text.picture_near_the_top,
    rules_text.images_are_local,
    rules_text.cells_are_text_or_code,
    rules_text.text_has_no_base64,
    rules_text.links_resolve,
    rules_text.text_and_code_in_proportion,
    rules_text.cells_are_short,
    rules_text.exercises_are_complete,
    rules_code.code_is_plain_python,
    rules_code.first_cell_starts_the_session,
    rules_code.full_mode_is_declared,
    rules_code.no_trailing_semicolon,
    rules_code.plots_end_with_show,
    rules_code.no_workers_with_cell_classes,
    rules_code.tags_are_known,
    rules_code.shown_is_checked,
    rules_code.exercises_stand_alone,
    rules_code.records_exist,
    rules_outputs.executed_in_order,
    rules_outputs.kernel_is_python3,
    rules_outputs.ids_and_metadata_are_plain,
    rules_outputs.no_widgets,
    rules_outputs.outputs_are_text_or_png,
    rules_outputs.pictures_are_png,
    rules_outputs.figures_are_small,
    rules_outputs.no_tracebacks,
    rules_outputs.no_stderr,
    rules_outputs.no_progress_bars,
    rules_outputs.no_addresses,
    rules_outputs.no_absolute_paths,
    rules_outputs.no_bare_objects,
    rules_outputs.floats_are_short,
    rules_text.measured_numbers_are_printed,
    rules_outputs.file_is_small,
)
