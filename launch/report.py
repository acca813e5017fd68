"""Makes tables, figures and a page from the results that evaluations left on disk. It needs no accelerator.

cxda report --runs='runs/glyphs/*/*' --report=runs/glyphs/report
cxda report --runs='runs/study/femnist/*/*' --report=docs/study --against=paper
cxda report --runs='runs/study/glyphs/*/*' --report=docs/study --against=paper_stand_ins
cxda report --runs='runs/study/glyphs/*/*' --report=docs/study --record=docs/study/glyphs.records
cxda report --runs='docs/study/records/unipen-*.records' --report=again

Writes into the folder of --report:

    report.html     one file with all of the below, each run, and an explorer of what queries attend to, for any browser
    tables.md .csv
    figures/        .png and .svg

--against=paper sets the paper's figure beside each of ours that was measured on the paper's data. It says the
difference, whether this lies within the combined standard error, and what sets the two apart.
--against=paper_stand_ins does so for data that replace the paper's too: glyphs and unipen for FEMNIST, glyphs_c and
cifar10_c for CIFAR-C, smoke configs, and data with marks, such as regenerated domains.

--record writes one small file beside the report: the row and the config of each result, and how many queries of each
task are right. --runs takes such files too, and patterns of them. Then whoever has the files can make the tables, the
score figures and the paired differences again, without the runs and without the data. It needs results whose metric
is the accuracy.

Runs that cannot be read are named, and the rest is reported. Seeds whose training is unfinished are marked and left out
of all means; --unfinished takes them in, still marked. Different data sets of one name are told apart by their hashes.
"""

from absl import flags

from cxda_jax.errors import UserError

from . import cli

_RUNS = cli.define_runs()
flags.adopt_module_key_flags(cli)
_AGAINST = flags.DEFINE_string(
    "against", None, "Set the paper's figures beside ours: paper, paper_stand_ins.", allow_override=True
)
_REPORT = flags.DEFINE_string("report", None, "The folder to write.")
_RECORD = flags.DEFINE_string("record", None, "A file of records to write, such as study.records.")
_UNFINISHED = flags.DEFINE_bool(
    "unfinished", False, "Take seeds whose training is unfinished into means and figures too, marked."
)


def main() -> None:
    with cli.loading():
        from cxda_jax.studies.reporting import report_runs
    runs = cli.insist_on_runs(_RUNS.value)
    folder = cli.insist(_REPORT.value, "--report", "name the folder to write, such as --report=runs/report")
    if _RECORD.value and not _RECORD.value.endswith(".records"):
        raise UserError(f"--record={_RECORD.value}: name a file that ends in .records, such as study.records")
    report_runs(runs, folder, cli.DATA_DIR.value, _AGAINST.value or "", _UNFINISHED.value, _RECORD.value or "")


if __name__ == "__main__":
    cli.run(main)
