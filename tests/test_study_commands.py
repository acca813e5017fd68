"""What the study trains: rates by the written rule, and commands that exist."""

import json
from pathlib import Path

import pytest

from cxda_jax import config
from cxda_jax.study.cells import parse_cell
from docs.study import make, run, tables, tune


def test_commands_of_the_study_fine_tune_at_the_chosen_rate(monkeypatch, tmp_path, capsys):
    called = []
    monkeypatch.setattr(tune, "shares", lambda benchmark: {"ft_em": 0.03, "cotta": 0.1})
    monkeypatch.setattr(run.subprocess, "run", lambda command, **_: called.append(" ".join(command)))
    assert run.fine_tune("unipen_shares", 0, tmp_path, "data", dry_run=False) == [tmp_path / "unipen" / "erm" / "0"]
    train, test = called
    assert " reproduce --benchmark=unipen " in train and " --only=erm --tests=usual " in train
    flags = f"--runs={tmp_path}/unipen/erm/0 --methods=ft_em --config.finetune.rate=0.03 --data_dir=data"
    assert test.endswith(f"-m cxda_jax evaluate {flags}"), "the paper's share of cotta's rate is in another part"
    run.fine_tune("unipen_shares", 0, tmp_path, "data", dry_run=True)
    assert called[2].endswith(" --dry_run") and len(called) == 3 and capsys.readouterr().out.endswith(f"{flags}\n")
    # All are in one folder of runs; each is recorded once.
    labels = ("erm", "ft_em", "ft_em,finetune.rate=0.03", "cotta")
    rows = [{"label": label, "method": label.split(",")[0]} for label in labels]
    parts = {
        name: [r["label"] for r in rows if run.belongs(name, r)]
        for name in ("unipen", "unipen_tuning", "unipen_shares")
    }
    assert parts == {
        "unipen": ["erm"],
        "unipen_tuning": ["ft_em", "cotta"],
        "unipen_shares": ["ft_em,finetune.rate=0.03"],
    }
    monkeypatch.setattr(tune, "shares", lambda benchmark: {})
    with pytest.raises(SystemExit, match="first run python -m docs.study.tune --data_dir=data"):
        run.fine_tune("unipen_shares", 0, tmp_path, "data", dry_run=False)


def test_each_seed_tests_the_methods_without_a_training_once(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(run.subprocess, "run", lambda command, **_: called.append(" ".join(command)))
    for seed, kinds in enumerate(run.PARTS["unipen"].tests):
        called.clear()
        run.study("unipen", seed, tmp_path, "data", dry_run=False)
        of_untrained = [command for command in called if ",".join(run.UNTRAINED) in command]
        assert len(of_untrained) == 1, "with fewer images by the plan of all jobs, else by a command of its own"
        assert ("--tests=other_starts" in of_untrained[0]) == ("contexts" in kinds)
        assert (" evaluate " in of_untrained[0]) == (kinds == run.USUAL)
    base = tmp_path / "unipen" / "erm_iid" / "4"
    assert of_untrained[0].endswith(f"--runs={base} --methods={','.join(run.UNTRAINED)} --from=erm_iid --data_dir=data")
    for method in run.UNTRAINED[1:]:
        (base / f"{method},from=erm_iid").mkdir(parents=True)
        (base / f"{method},from=erm_iid" / "result.json").touch()
    run.study("unipen", 4, tmp_path, "data", dry_run=False)
    assert f" --methods={run.UNTRAINED[0]} " in called[-1], "what was tested is not tested again"
    called.clear()
    run.study("unipen_tuning", 1, tmp_path, "data", dry_run=False)
    assert len(called) == 1, "erm_iid is no method of this part"
    called.clear()
    run.study("cifar10_c_full", 0, tmp_path, "data", dry_run=False, workers=4)
    (command,) = called  # the page has no method without a training here
    only = "--only=erm_iid,bn,cxda,cxda_any --tests=usual"
    assert f"--variant= --seeds=0 --data_dir=data {only}" in command and "--workers=4" in command


def test_models_of_the_papers_size_are_tested_apart_from_their_runs(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(run.subprocess, "run", lambda command, **_: called.append(command))
    with pytest.raises(SystemExit, match="model: missing; first run cifar10_c_full"):
        run.curves(0, tmp_path, "data", dry_run=False)
    for method in run.CURVED:
        model = tmp_path / "cifar10_c" / method / "0" / "model"
        model.mkdir(parents=True)
        (model / "card.json").touch()
        (model.parent / "result.json").touch()  # of all 11,000 tasks, which must not be read for the 600
    folders = run.curves(0, tmp_path, "data", dry_run=False)
    assert [f.relative_to(tmp_path / "cifar10_c_curves").parts for f in folders] == [(m, "0") for m in run.CURVED]
    assert all([*folder.glob("**/*")] == [folder / "card.json"] for folder in folders)
    assert [command[-3:] for command in called] == [
        [f"--runs={folders[0]}", "--num_tasks=600", "--data_dir=data"],
        ["--context=0,1,5,20", "--num_tasks=600", "--data_dir=data"],
    ]
    called.clear()
    (folders[0] / "result.json").touch()
    (folders[1] / "cxda_any,context=0").mkdir()
    (folders[1] / "cxda_any,context=0" / "result.json").touch()
    run.curves(0, tmp_path, "data", dry_run=False)
    assert len(called) == 1 and f"--runs={folders[1]}" in called[0], "only what is missing"


def test_the_rule_for_rates():
    def tried(*scores):
        return {
            rate: {"val": score} for rate, score in zip((0.003, 0.01, 0.03, 0.1, 0.3), scores, strict=True) if score
        }

    assert tune.next_rate({}) == 0.1 and tune.next_rate(tried(0, 0, 0, 70, 0)) == 0.03
    assert tune.next_rate(tried(0, 60, 71, 70, 0)) is None, "the best is in the middle"
    assert tune.next_rate(tried(0, 72, 71, 70, 0)) == 0.003 and tune.next_rate(tried(0, 60, 71, 72, 0)) == 0.3
    assert tune.next_rate(tried(73, 72, 71, 70, 0)) is None and tune.next_rate(tried(0, 60, 71, 72, 73)) is None
    assert tune.chosen(tried(0, 71, 71, 70, 0)) == 0.01, "of equal ones the smaller"


def test_configs_take_the_rates_that_were_chosen():
    told = json.loads((Path(make.__file__).parent / "tuning.json").read_text())["rates"]
    assert {data: {m: entry["rate"] for m, entry in of.items()} for data, of in told.items()} == config.RATES
    for entry in (entry for of in told.values() for entry in of.values()):
        assert entry["rate"] == tune.chosen({float(rate): scores for rate, scores in entry["tried"].items()})
    for data, methods in json.loads((Path(make.__file__).parent / "tuning.json").read_text()).get("shares", {}).items():
        for method, entry in methods.items():
            assert list(entry["tried"]) == [f"{share:g}" for share in tune.SHARES]
            scores = {float(share): of for share, of in entry["tried"].items()}
            assert entry["rate"] == tune.chosen(scores) == tune.shares(data)[method]
    for flag, data, method in (
        ("unipen:cxda", "unipen", "cxda"),
        ("unipen:cxda_p2p,sizes", "unipen", "cxda"),
        ("glyphs:ft_em", "unipen", "erm"),
        ("qmnist:icrm", "unipen", "icrm"),
        ("cifar10_c:cml,small", "cifar10_c", "cml"),
        ("glyphs_c:cxda_supervised", "cifar10_c", "cxda"),
    ):
        assert config.read(flag)["optimizer"]["learning_rate"] == config.RATES[data][method]
    assert config.read("cifar10_c:cxda")["optimizer"]["learning_rate"] == 0.01, "the paper's"


def test_each_training_of_the_study_is_a_command_that_exists(tmp_path):
    base = config.resolve(config.load("unipen:cxda"))
    for (folder, command), name in zip(run.change(1, tmp_path), run.CHANGES, strict=True):
        flags = dict(flag.removeprefix("--config.").split("=", 1) for flag in command if flag.startswith("--config."))
        spec = next(flag.removeprefix("--config=") for flag in command if flag.startswith("--config="))
        changed = config.resolve(config.load(spec, list(flags.items())))
        assert folder == tmp_path / "unipen_changes" / name / "1" and changed["seed"] == 1
        differing = {field.removeprefix("config.") for field in config.differences(base, changed)} - {"seed"}
        assert differing and (changed["method"] != "cxda" or differing == set(flags) - {"seed"}), name
        assert name in tables.CHANGES
    commands = dict(run.again(tmp_path, "PYTHON"))
    assert len(commands) == len(run.REPEATED) * (len(run.AGAIN) + 1) and all(folder.name == "0" for folder in commands)
    # Without a Python of other versions, nothing may be called so.
    assert len(dict(run.again(tmp_path, None))) == len(run.REPEATED) * len(run.AGAIN)
    other = commands[tmp_path / "unipen_spread" / "cxda,other versions" / "0"]
    assert other[:5] == ["PYTHON", "-m", "cxda_jax", "train", "--config=unipen:cxda"] and len(other) == 6
    pinned = commands[tmp_path / "unipen_spread" / "erm_iid,one core" / "0"]
    assert pinned[:3] == ["taskset", "-c", "0"] and pinned[-2] == "--config=unipen:erm_iid"
    page = (Path(make.__file__).parent / "index.md").read_text()
    for where, command in run.cells(1, tmp_path):
        cell = next(flag for flag in command if flag.startswith("--cell="))
        assert (where.parent.name, where.name) == parse_cell(cell.removeprefix("--cell=")) and where.name == "1"
        assert f"--records={run.RECORDS / 'unipen-1.records'}" in command
        assert f"cxda {' '.join(command[3:5])} --cell=" in page, "the page's command"


def test_the_first_seed_of_all_parts_comes_first():
    order = list(run.units([], []))
    assert [seed for _, seed in order] == sorted(seed for _, seed in order) and len(set(order)) == len(order)
    assert {name for name, seed in order if seed == 4} == {"unipen"}
    assert list(run.units(["glyphs"], [1])) == [("glyphs", 1)]
    # An unasked training here would be no fresh install, or would take a CPU weeks.
    assert {*run.SEEDS} - {name for name, _ in order} == set(run.ASKED_FOR)
    assert list(run.units(["unipen_cells"], [])) == [("unipen_cells", 0), ("unipen_cells", 1)]
