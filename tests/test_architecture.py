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
    "mesh": {"errors"},
    "hosts": {"errors", "mesh", "progress", "stops"},
    "metrics": {"errors"},
    "optimizers": {"errors", "config"},
    "augment": {"errors", "types", "config"},
    "disk": {"errors", "types"},
    "progress": {"errors", "disk"},
    "nets": {"errors", "types", "backend", "config", "disk"},
    "data": {"errors", "types", "config", "disk", "memory", "mesh", "progress"},
    "methods": {"errors", "types", "augment", "backend", "config", "losses", "nets"},
    "train": {"errors", "types", "augment", "backend", "cost", "data", "disk", "memory", "mesh", "progress"},
    "evaluation": {"types", "backend", "data", "mesh", "metrics"},
    "experiment": {
        "errors",
        "types",
        "augment",
        "backend",
        "config",
        "data",
        "methods",
        "metrics",
        "nets",
        "optimizers",
        "train",
    },
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
ALLOWED["ahead"] = (LIBRARY - {"pictures"}) | {"study"}
ALLOWED["bench"] = (LIBRARY - {"pictures"}) | {"study"}
ALLOWED["device"] = {
    "errors",
    "types",
    "backend",
    "config",
    "data",
    "disk",
    "experiment",
    "progress",
    "report",
    "stops",
}
ALLOWED["export"] = LIBRARY | {"device"}
ALLOWED["doctor"] = {"errors", "backend", "memory"}
ALLOWED["__main__"] = {"stops"}
FILES = sorted((ROOT / "cxda_jax").rglob("*.py"))
CONFIGS, COMMANDS = (sorted((ROOT / folder).glob("*.py")) for folder in ("configs", "launch"))
EACH_FILE = pytest.mark.parametrize("path", [*FILES, *COMMANDS, *CONFIGS], ids=lambda p: str(p.relative_to(ROOT)))
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


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
def test_imports_run_one_way_and_optional_packages_where_they_are_used(path):
    part = path.relative_to(ROOT / "cxda_jax").parts[0].removesuffix(".py")
    if part != "bench" or not path.name.startswith("torch_"):  # the peers, which are run by name
        names = {name.split(".")[0] for name in imports(path, top_level_only=True)}
        assert not names & {"tensorflow", "tensorflow_datasets", "torch", "pillow_heif", "wilds", "sklearn", "pandas"}
    if part == "__init__":
        return
    used = {name.split(".")[1] for name in imports(path) if name.startswith("cxda_jax.")}
    assert used <= ALLOWED[part] | {part, "version", "__version__"}
    outside = {"absl", "launch", "configs", "tests"} | ({"ml_collections"} if part != "config" else set())
    assert not {n.split(".")[0] for n in imports(path)} & outside


@pytest.mark.parametrize("path", ["train.py", "evaluation.py"])
def test_the_loops_know_no_method_net_or_benchmark(path):
    used = set(imports(ROOT / "cxda_jax" / path))
    assert not any(name.startswith(("cxda_jax.methods", "cxda_jax.nets")) for name in used)
    assert {n for n in used if n.startswith("cxda_jax.data")} <= {"cxda_jax.data.episodes", "cxda_jax.data.sources"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_configs_import_the_schema_alone(path):
    assert {name for name in imports(path) if name.startswith("cxda_jax")} == {"cxda_jax.config"}


def test_commands_are_short_and_load_nothing_heavy():
    lines = {path.name: len(path.read_text().splitlines()) for path in COMMANDS}
    assert sum(lines.values()) < 1000 and max(n for name, n in lines.items() if name != "cli.py") < 120
    for path in COMMANDS:
        top = {name for name in imports(path, top_level_only=True) if name.startswith("cxda_jax")}
        assert top <= {"cxda_jax.stops", "cxda_jax.disk.reading", "cxda_jax.errors"}, path
        assert "%" not in (ast.get_docstring(ast.parse(path.read_text())) or ""), (
            "absl formats it: '10% a' would become a path"
        )


def test_every_package_is_installed():
    inside = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "cxda_jax").rglob("__init__.py")}
    assert set(SETUP["packages"]) == inside | set(SETUP["package-dir"])


def test_files_that_are_no_code_are_installed_too():
    places = [(ROOT / package.replace(".", "/"), found) for package, found in SETUP["package-data"].items()]
    installed = {path for folder, patterns in places for pattern in patterns for path in folder.glob(pattern)}
    others = {p for p in (ROOT / "cxda_jax").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert others and others <= installed


@EACH_FILE
def test_no_file_is_long_and_nothing_that_is_read_is_run(path):
    assert len(path.read_text().splitlines()) <= 350
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called, options = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        assert called not in ("eval", "exec", "pickle.load", "pickle.loads", "joblib.load", "yaml.load"), called
        assert options.get("allow_pickle", "False") == "False", called
        assert called != "torch.load" or options.get("weights_only") == "True", called
