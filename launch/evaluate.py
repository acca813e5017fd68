"""Tests the best checkpoint of each run and prints one table; or an adapter of cxda fit, on described images.

cxda evaluate --runs='runs/glyphs/*/*'
cxda evaluate --runs='runs/glyphs/*/*' --methods=all
cxda evaluate --runs='runs/glyphs/erm/*' --methods=ft_em,cotta --config.finetune.steps=1
cxda evaluate --runs=runs/glyphs/cxda/0 --num_tasks=2000
cxda evaluate --runs='runs/glyphs/*/*' --against=bn
cxda evaluate --runs='runs/glyphs/*/*' --num_domains=1,2,5,10,20 --support_size=10,20,50,100,200,500
cxda evaluate --runs='runs/glyphs/erm/*' --methods=ft_em,ft_im --steps=1
cxda evaluate --runs='runs/glyphs/erm_iid/*' --methods=t3a,lame --from=erm_iid
cxda evaluate --runs='runs/glyphs/*/*' --context=0,1,2,5,10,20,50,100,200,500 --against=erm_iid
cxda evaluate --runs='runs/glyphs/erm/*' --methods=t3a --config.t3a.keep=5 --validation
cxda evaluate --adapter=ADAPTER --features=features.npz

A run directory is all it needs: the config, the data set and the weights follow from it. Writes result.json,
predictions.npz and, for methods that attend, attention.png into each run; what is tested on the checkpoint of another
method, or with changed fields, into a folder of its own there, such as runs/glyphs/erm/0/ft_em,finetune.steps=1.

Methods without a training of their own start from the runs of erm, or with --from=erm_iid from those of erm_iid. Their
label is then one such as t3a,from=erm_iid.

--num_domains and --support_size test, in place of the usual tasks, tasks of that many support domains (and as many
support images as usual), or of that many support images; as many queries as there are support images of one domain. A
program is compiled once for each method and shape; checkpoints are data. What fails is named, and the rest goes on.

--context tests the usual tasks when only their first n support images have arrived, for each n; the queries stay the
same. The images arrive in random order, or with --arrival domain after domain (by_domain) or class after class
(by_class); the domain of the queries may be missing. Beyond the usual support, further images of the same domains
arrive. Tables show the scores at each n and the area under them, and --against=erm_iid adds paired differences at each
n. What uses no support is tested at n = 0 alone.

--validation tests on the validation domains, so that fields can be chosen before the test domains are seen. The
results lie in folders of their own, such as runs/glyphs/erm/0/t3a,validation, and are shown apart from those on test
domains.

Several devices share the tasks. Several hosts do so with --distributed, as in cxda train;
all of them must find the runs.

--adapter is what cxda fit wrote, and --features what cxda features made of labelled images of other domains. The table
shows, for devices of one domain and of several, the accuracy of the classifier and what a buffer of 5, 20 and 100
images adds, beside EM, which needs no training. Nothing is written.

Of methods that use the support, result.json also counts among the queries of the first 24 tasks (compared) those that
are wrong without support images and right with them (corrected), and the reverse (spoiled).
"""

from absl import flags

from . import cli

cli.define_distributed()
_RUNS = cli.define_runs()
_OTHER_DATA = cli.define_other_data()
flags.adopt_module_key_flags(cli)
_METHODS = flags.DEFINE_list(
    "methods", [],
    "What to test: names, or all. Methods without a training of their own start from the runs of erm; see --from. "
    "Each run's own if empty.",
)  # fmt: skip
_FROM = flags.DEFINE_string("from", "erm", "What methods without a training of their own start from: erm or erm_iid.")
_AGAINST = flags.DEFINE_string("against", None, "A method among the runs: print each one's paired difference to it.")
_NUM_DOMAINS = flags.DEFINE_list("num_domains", [], "Test with so many support domains: 1,2,5,10,20.")
_SUPPORT_SIZE = flags.DEFINE_list("support_size", [], "Test with so many support images: 10,20,50,100,200,500.")
_STEPS = flags.DEFINE_list("steps", [], "Test what fine-tunes with so many steps: 1,10.")
_CONTEXT = flags.DEFINE_list("context", [], "Test with the first so many support images: 0,1,2,5,10,20,50,100,200,500.")
_ARRIVAL = flags.DEFINE_enum(
    "arrival", "mixed", ["mixed", "by_domain", "by_class"], "The order in which the images of --context arrive."
)
_VALIDATION = flags.DEFINE_boolean("validation", False, "Test on the validation domains.")
_NUM_TASKS = flags.DEFINE_integer("num_tasks", None, "Test tasks; the config's number unless given.", lower_bound=1)
_ADAPTER = flags.DEFINE_string("adapter", "", "In place of --runs: the folder of an adapter.")
_FEATURES = flags.DEFINE_string("features", "", "With --adapter: the .npz file of cxda features.", allow_override=True)


def evaluate_adapter() -> None:
    with cli.loading():
        from pathlib import Path

        from cxda_jax.adapter.adapter import load_adapter
        from cxda_jax.adapter.features import read_labelled
        from cxda_jax.adapter.fit import gains_on
        from cxda_jax.adapter.report import as_table
        from cxda_jax.device.attached import insist_on_same
        from cxda_jax.errors import UserError
    features = cli.insist(_FEATURES.value, "--features", "give the file of cxda features of the images to test on")
    if _RUNS.value:
        raise UserError(f"--runs={','.join(_RUNS.value)}: given beside --adapter; give one of the two")
    adapter = load_adapter(folder := Path(_ADAPTER.value).expanduser())
    logits, labels, domains, style, _, about = read_labelled(Path(features).expanduser(), adapter.head)
    if adapter.origin:
        insist_on_same(about, adapter.origin, f"--features={features}", folder)
    report = gains_on(adapter, logits, labels, domains, None if adapter.keys == "logits" else style)
    if not adapter.helps:
        print("the adapter's own validation showed no sure gain, so devices keep the classifier's own answers")
    print(as_table(report))
    plain, adapted = (report["calibration"][n] for n in ("0", "100"))
    print(f"calibration error: {plain['ece'][0]:.1%} before, {adapted['ece'][1]:.1%} after with 100 images")
    print(f"wrong of the surest 80 % of answers: {plain['risk']['0.8']:.1%} before, {adapted['risk']['0.8']:.1%} after")


def main() -> None:
    if _ADAPTER.value:
        return evaluate_adapter()
    with cli.loading(changes=True):
        from cxda_jax.errors import UserError
        from cxda_jax.machine import backend
        from cxda_jax.studies import settings, testing
        from cxda_jax.studies.finding import Request
    backend.keep_freed_memory()
    backend.keep_compiled()
    runs, wanted = cli.insist_on_runs(_RUNS.value), []
    if _ARRIVAL.value != "mixed" and not _CONTEXT.value:
        raise UserError(
            f"--arrival={_ARRIVAL.value} orders the images of --context; give it too, such as --context=0,10"
        )
    context = settings.ARRIVALS[_ARRIVAL.value]
    for kind, flag in (
        ("num_domains", _NUM_DOMAINS), ("support_size", _SUPPORT_SIZE), (context, _CONTEXT), (settings.STEPS, _STEPS),
    ):  # fmt: skip
        wanted += settings.of_flag(kind, flag.value)
    with cli.joined():
        request = Request(
            _METHODS.value, cli.CHANGES, wanted or [settings.USUAL], _NUM_TASKS.value, _AGAINST.value, _FROM.value,
            "val" if _VALIDATION.value else "test", _OTHER_DATA.value,
        )  # fmt: skip
        testing.evaluate_runs(runs, request, cli.DATA_DIR.value)


if __name__ == "__main__":
    cli.run(main)
