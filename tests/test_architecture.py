"""Imports run one way, and heavy or optional packages stay inside the functions that need them."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Each part may import those named here, and itself.
ALLOWED = {
    "errors": set(),
    "version": set(),
    "stops": set(),
    "types": set(),
    "cost": {"backend"},
    "losses": set(),
    "fields": set(),
    "config": {"errors", "fields"},
    "backend": {"errors"},
    "memory": {"errors", "backend"},
    "metrics": {"errors"},
    "augment": {"errors", "types", "config"},
    "disk": {"errors", "types"},
    "progress": {"errors", "disk"},
    "nets": {"errors", "types", "backend", "config", "disk"},
    "data": {"errors", "types", "config", "disk", "memory", "progress"},
    "methods": {"errors", "types", "augment", "backend", "config", "losses", "nets"},
    "train": {"errors", "types", "augment", "backend", "cost", "data", "disk", "memory", "progress"},
    "evaluation": {"types", "backend", "data", "metrics"},
    "experiment": {"errors", "types", "augment", "backend", "config", "data", "methods", "metrics", "nets", "train"},
    "pictures": {"errors", "disk", "data"},
}
LIBRARY = set(ALLOWED)
ALLOWED["study"] = LIBRARY
ALLOWED["report"] = {
    "errors",
    "backend",
    "config",
    "data",
    "disk",
    "experiment",
    "metrics",
    "pictures",
    "progress",
    "study",
}
ALLOWED["bench"] = LIBRARY - {"pictures"}
ALLOWED["doctor"] = {"errors", "backend", "memory"}
ALLOWED["__main__"] = {"stops"}
FILES = sorted((ROOT / "cxda_jax").rglob("*.py"))
SOURCES = [*FILES, *sorted((ROOT / "launch").glob("*.py")), *sorted((ROOT / "configs").glob("*.py"))]


def imports(path, top_level_only=False):
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "cxda_jax":
                yield from (f"cxda_jax.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path):
    part = path.relative_to(ROOT / "cxda_jax").parts[0].removesuffix(".py")
    if part == "__init__":
        return
    used = {name.split(".")[1] for name in imports(path) if name.startswith("cxda_jax.")}
    assert used <= ALLOWED[part] | {part, "version", "__version__"}
    outside = {"absl", "launch", "configs", "tests"} | ({"ml_collections"} if part != "config" else set())
    assert not {n.split(".")[0] for n in imports(path)} & outside


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_optional_packages_are_imported_where_they_are_used(path):
    if path.parent.name == "bench" and path.name.startswith("torch_"):
        return  # the peers, which are run by name
    names = {name.split(".")[0] for name in imports(path, top_level_only=True)}
    assert not names & {"tensorflow", "tensorflow_datasets", "torch", "wilds", "sklearn", "pandas"}


@pytest.mark.parametrize("path", ["train.py", "evaluation.py"])
def test_the_loops_know_no_method_net_or_benchmark(path):
    used = set(imports(ROOT / "cxda_jax" / path))
    assert not any(name.startswith(("cxda_jax.methods", "cxda_jax.nets")) for name in used)
    assert {n for n in used if n.startswith("cxda_jax.data")} <= {"cxda_jax.data.episodes", "cxda_jax.data.sources"}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.name)
def test_configs_import_the_schema_alone(path):
    assert {name for name in imports(path) if name.startswith("cxda_jax")} == {"cxda_jax.config"}


def test_commands_are_short_and_load_nothing_heavy():
    files = sorted((ROOT / "launch").glob("*.py"))
    lines = {path.name: len(path.read_text().splitlines()) for path in files}
    assert sum(lines.values()) < 900 and max(n for name, n in lines.items() if name != "cli.py") < 120
    for path in files:
        top = {name for name in imports(path, top_level_only=True) if name.startswith("cxda_jax")}
        assert top <= {"cxda_jax.stops", "cxda_jax.disk.reading", "cxda_jax.errors"}, path


def test_no_file_is_long():
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 350, path


def test_every_package_is_installed():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    inside = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "cxda_jax").rglob("__init__.py")}
    assert set(setup["packages"]) == inside | set(setup["package-dir"])


def test_files_that_are_no_code_are_installed_too():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    installed = {
        p for package, found in patterns.items() for f in found for p in (ROOT / package.replace(".", "/")).glob(f)
    }
    others = {p for p in (ROOT / "cxda_jax").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert others and others <= installed


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_that_is_read_is_run(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called, options = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        assert called not in ("eval", "exec", "pickle.load", "pickle.loads", "joblib.load", "yaml.load"), called
        assert options.get("allow_pickle", "False") == "False", called
        assert called != "torch.load" or options.get("weights_only") == "True", called


@pytest.mark.parametrize("path", sorted((ROOT / "launch").glob("*.py")), ids=lambda p: p.name)
def test_help_is_shown_as_it_is_written(path):
    assert "%" not in (
        ast.get_docstring(ast.parse(path.read_text())) or ""
    )  # absl formats it: '10% a' would become a path
