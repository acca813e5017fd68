"""Makes tables, figures and a page from the results that evaluations left on disk. It needs no accelerator.

python -m launch.report --runs='runs/glyphs/*/*' --report=runs/glyphs/report
python -m launch.report --runs='runs/study/femnist/*/*' --report=docs/study --against=paper
python -m launch.report --runs='runs/study/glyphs/*/*' --report=docs/study --against=paper_stand_ins

Writes into the folder of --report:

    report.html     one file with all of the below, each run, and an explorer of what queries attend to, for any browser
    tables.md .tex .csv
    figures/        .png and .svg

--against=paper sets the paper's figure beside each of ours that was measured on the paper's data. It says the difference,
whether this lies within the combined standard error, and what sets the two apart. --against=paper_stand_ins does so for data
that replace the paper's too: glyphs and unipen for FEMNIST, glyphs_c and cifar10_c for CIFAR-C, smoke configs, and data with
marks, such as regenerated domains.

Runs that cannot be read are named, and the rest is reported. Seeds whose training is unfinished are marked and left out of
all means; --unfinished takes them in, still marked. Different data sets of one name are told apart by their hashes.
"""

from absl import flags

from . import cli

flags.adopt_module_key_flags(cli)
_RUNS = cli.define_runs()
_AGAINST = flags.DEFINE_string(
    "against", None, "Set the paper's figures beside ours: paper, paper_stand_ins.", allow_override=True
)
_REPORT = flags.DEFINE_string("report", None, "The folder to write.")
_UNFINISHED = flags.DEFINE_bool(
    "unfinished", False, "Take seeds whose training is unfinished into means and figures too, marked."
)


def main() -> None:
    with cli.loading():
        from cxda_jax.report.making import report_runs
    runs = cli.insist_on_runs(_RUNS.value)
    folder = cli.insist(_REPORT.value, "--report", "name the folder to write, such as --report=runs/report")
    report_runs(runs, folder, cli.DATA_DIR.value, _AGAINST.value or "", _UNFINISHED.value)


if __name__ == "__main__":
    cli.run(main)
