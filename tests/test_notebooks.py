"""Notebooks run from start to end, define nothing of their own, and are stored with what they showed."""

import ast
import importlib.util
import re
import shutil
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MINE = {"prune_your_own_loop": ["Net"]}  # the reader's own code
nbformat = pytest.importorskip("nbformat", reason="nbformat is missing: pip install -e '.[dev]'")
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook) -> list:
    return [output for cell in code_cells(notebook) for output in cell.outputs]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The notebooks and what they read, elsewhere: what a run leaves behind does not land in the checkout."""
    root = tmp_path_factory.mktemp("notebooks")
    for path in [*NOTEBOOKS, *ROOT.glob("experiments/*/results.csv")]:
        target = root / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return root


@pytest.fixture(scope="module")
def execute():
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason=f"{package} is missing: pip install -e '.[dev]'")
    spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@each
def test_it_runs_and_shows_as_many_figures_as_the_stored_one(path, copy, execute):
    with tempfile.TemporaryDirectory() as empty:
        run = execute.executed(copy / path.relative_to(ROOT), TNVP_DATA_ROOT=empty, TNVP_NOTEBOOK_STEPS="60")
    assert all(cell.execution_count for cell in code_cells(run))
    stored = nbformat.read(path, as_version=4)
    kinds = [[[output.output_type for output in cell.outputs] for cell in code_cells(book)] for book in (run, stored)]
    assert kinds[0] == kinds[1]


def test_a_failing_cell_is_an_error(tmp_path, execute):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2, 'one is not two'")])
    nbformat.write(notebook, tmp_path / "failing.ipynb")
    with pytest.raises(Exception, match="one is not two"):
        execute.executed(tmp_path / "failing.ipynb")


@each
def test_it_is_stored_with_outputs_and_without_errors(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "executed once, from start to end"
    assert {output.output_type for output in outputs(notebook)} <= {"stream", "display_data", "execute_result"}
    assert not [output.text for output in outputs(notebook) if output.get("name") == "stderr"]
    assert path.stat().st_size < 400_000


@each
def test_it_names_no_place_of_a_machine(path):
    text = path.read_text()
    assert not re.search(
        r"(?<![\w.])/(home|root|tmp|work|Users|opt|var|private)/|[A-Z]:\\\\|site-packages| at 0x", text
    )
    assert str(ROOT) not in text


@each
def test_it_defines_nothing_but_what_is_the_readers(path):
    source = "\n".join(cell.source for cell in code_cells(nbformat.read(path, as_version=4)))
    tree = ast.parse(re.sub(r"^%.*$", "", source, flags=re.MULTILINE))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = {id(node) for found in classes for node in found.body}
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and id(node) not in methods
    ]
    assert [found.name for found in classes] == MINE.get(path.stem, [])
    assert functions == []


@each
def test_its_links_lead_somewhere(path):
    notebook = nbformat.read(path, as_version=4)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", prose)
    assert links, "each notebook leads to the next"
    assert all((FOLDER / link).is_file() for link in links)
