"""Imports point down only: pruning ← harness parts ← experiment ← run.py; figures reads results alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tnvp

PACKAGE = Path(tnvp.__file__).parent
ORDER = [  # each module may import tnvp modules of earlier rows, and of its own row only where NEIGHBOURS says so
    {"files", "pruning"},
    {"image_folder", "locks", "models", "run_directory", "tracking", "training", "wandb_file"},
    {"published", "figure_style", "run_state", "resume", "sweep"},
    {"schema", "data", "checkpoint", "results", "run_figures", "trace_figures", "graph_figure", "trunk"}
    | {"continuation", "distributed"},
    {"config", "controls", "progress", "events", "journal", "latency", "stability"},
    {"study_figures", "setting_figures", "stability_figure", "width_figures", "search_figure", "command_line"},
    {"figures", "setup"},
    {"summary"},
    {"experiment", "declaration"},
    {"study"},
]
MAY = {  # modules whose tnvp imports are fewer than their row allows
    "figures": {
        "controls",
        "figure_style",
        "results",
        "run_directory",
        "run_figures",
        "search_figure",
        "setting_figures",
        "stability_figure",
        "study_figures",
        "trace_figures",
        "width_figures",
    },
    "study_figures": {"controls", "figure_style", "results", "run_directory"},  # never W&B
    "setting_figures": {"figure_style", "results", "run_directory"},
    "width_figures": {"controls", "figure_style", "results", "run_directory"},
    "search_figure": {"figure_style", "run_directory"},
    "declaration": {"figures"},
    "stability_figure": {"figure_style", "results", "run_directory"},
    "stability": {"files", "run_directory", "trace_figures"},
    "controls": {"results"},
    "latency": {"checkpoint", "files", "models", "run_directory"},
    "run_figures": {"figure_style", "run_directory"},
    "trace_figures": {"figure_style", "run_directory"},
    "graph_figure": {"figure_style"},
    "figure_style": {"files"},
    "results": {"files", "run_directory", "tracking"},  # exports what a server has
    "run_directory": {"files"},
    "tracking": {"wandb_file"},
    "wandb_file": set(),
    "checkpoint": {"files", "models", "pruning"},
    "files": set(),
    "models": set(),
    "training": set(),
    "sweep": {"files", "locks", "resume", "run_directory"},
    "trunk": {"files", "locks", "run_directory", "run_state", "training"},
    "run_state": {"files", "run_directory"},
    "resume": {"training"},
    "continuation": {"locks", "pruning", "resume", "run_directory", "run_state", "training"},
    "locks": set(),
    "command_line": {"config"},
    "distributed": {"pruning", "training"},
    "data": {"image_folder", "published"},
    "setup": {
        "config",
        "data",
        "events",
        "journal",
        "pruning",
        "run_directory",
        "run_state",
        "schema",
        "tracking",
        "training",
    },
    "summary": {"config", "figures", "run_directory", "setup", "tracking"},
    "published": {"image_folder"},
    "pruning": set(),
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def noun(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The top-level parts of tnvp that a module imports, and other packages by their name."""
    found = set()
    depth = len(path.relative_to(PACKAGE).parts) - 1
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            whole = [node.module] if node.module != "tnvp" else [f"tnvp.{alias.name}" for alias in node.names]
            found |= set(whole)
        elif isinstance(node, ast.ImportFrom):
            above = ["tnvp", *path.relative_to(PACKAGE).parts[:depth]][: depth + 2 - node.level]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {".".join([*above, name]) for name in names}
    return found


def inside(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("tnvp.")} - {noun(path)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    row = next(i for i, nouns in enumerate(ORDER) if noun(path) in nouns)
    allowed = MAY.get(noun(path), set().union(*ORDER[:row]))
    assert inside(path) <= allowed


def test_every_module_has_its_row():
    assert {noun(path) for path in MODULES} == set().union(*ORDER)


@pytest.mark.parametrize("path", sorted((PACKAGE / "pruning").rglob("*.py")), ids=lambda path: path.name)
def test_the_method_imports_torch_only(path):
    outside = {name.split(".")[0] for name in imports(path)} - {"tnvp", "torch"}
    assert outside <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("package", "owners"),
    [("wandb", {"tracking"}), ("hydra", {"config", "command_line"}), ("sklearn", {"data"})],
)
def test_outside_packages_have_owners(package, owners):
    users = {noun(path) for path in MODULES if any(name.split(".")[0] == package for name in imports(path))}
    assert users == owners


def test_the_library_loads_without_the_harness():
    """Whoever prunes in their own loop waits for torch alone."""
    code = "import sys, tnvp; print([m for m in ('wandb', 'hydra', 'pandas', 'matplotlib', 'sklearn', 'torchvision') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
