"""Imports run one way, and heavy or optional packages stay inside the functions that need them."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Each part may import those named here, and itself.
ALLOWED = {
    "types": set(),
    "version": set(),
    "backend": set(),
    "memory": {"types", "backend"},
    "losses": set(),
    "metrics": {"types"},
    "augment": {"types"},
    "reading": {"types"},
    "progress": {"types", "files", "reading"},
    "files": {"types"},
    "manifest": {"files"},
    "safetensors": {"types", "reading"},
    "checkpoints": {"types", "files", "manifest", "reading", "safetensors"},
    "artefact": {"types", "files", "manifest", "safetensors"},
    "cost": set(),
    "nets": {"types", "reading", "safetensors"},
    "data": {"types", "memory", "progress", "reading"},
    "methods": {"types", "augment", "losses", "nets"},
    "train": {"types", "augment", "backend", "checkpoints", "cost", "data", "files", "manifest", "memory", "progress"},
    "evaluate": {"types", "backend", "data", "metrics"},
    "analysis": {"types", "backend", "data", "files", "manifest", "metrics", "reading"},
    "experiment": {"types", "augment", "data", "methods", "metrics", "nets", "train"},
}
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
    assert used <= ALLOWED[part] | {part}
    assert not {n.split(".")[0] for n in imports(path)} & {"absl", "ml_collections", "launch", "configs", "tests"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_optional_packages_are_imported_where_they_are_used(path):
    names = {name.split(".")[0] for name in imports(path, top_level_only=True)}
    assert not names & {"tensorflow", "tensorflow_datasets", "torch", "wilds", "sklearn", "pandas"}


@pytest.mark.parametrize("path", ["train.py", "evaluate.py"])
def test_the_loops_know_no_method_net_or_benchmark(path):
    used = set(imports(ROOT / "cxda_jax" / path))
    assert not any(name.startswith(("cxda_jax.methods", "cxda_jax.nets")) for name in used)
    assert {n for n in used if n.startswith("cxda_jax.data")} <= {"cxda_jax.data.episodes", "cxda_jax.data.sources"}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.name)
def test_configs_import_nothing_of_the_package(path):
    assert not any(name.startswith("cxda_jax") for name in imports(path))


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
