"""What work costs, by the compiler's own counts: guards of speed that need no clock."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.data import augment
from cxda_jax.data.published import PUBLISHED
from cxda_jax.machine import backend, cost
from cxda_jax.nets.attention import CHUNK
from cxda_jax.training import loop
from cxda_jax.training.experiment import make_optimizer
from tests.conftest import make_episode
from tests.nets import KEY, build_method
from tools.bench.cases import Case, make_runner, prepare


def test_operations_of_a_product_are_counted_on_gpus_and_tpus_too():
    lowered = jax.jit(jnp.matmul).lower(np.ones((7, 5)), np.ones((5, 11)))
    with mock.patch.object(type(lowered), "cost_analysis", lambda self: None):
        assert cost.flops(lowered) == 2 * 7 * 5 * 11


def state_of_shapes(method, tx, seed, example):
    """In place of train.init_state, for programs that are lowered alone."""
    variables = jax.eval_shape(method.init, KEY, example)
    step, finite = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
    return loop.TrainState(step, variables, jax.eval_shape(tx.init, variables["params"]), finite)


def lowered(*case, **options):
    with mock.patch.object(loop, "init_state", state_of_shapes):
        return make_runner(Case(*case, **options)).lower()


@pytest.mark.parametrize(("work", "statistics", "shape", "method"), [
    ("train", "flow", "cifar_c", "cxda"), ("train", "flow", "femnist", "bn"), ("train", "stop", "femnist", "cxda"),
    ("infer", "flow", "femnist", "cxda"),
])  # fmt: skip
def test_main_steps_do_the_operations_that_torch_counts(work, statistics, shape, method):
    """At full size, from the lowered program: a gradient too many, or a support encoded twice, would show."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    from tools.bench import torch_peer as peer

    case = Case(shape, method, work, statistics)
    (side, _, channels), classes = PUBLISHED[shape].image, PUBLISHED[shape].classes
    with torch.device("meta"):
        attention = peer.TorchAttention(128) if method == "cxda" else None
        of_peer = "buffers" if statistics == "stop" else "flow"
        module = peer.TorchCXDA(peer.TorchCNN(channels, classes, 128), attention, statistics=of_peer)
        images = [torch.rand(n, channels, side, side) for n in case.counts()]
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(work == "train"):
        logits = module(*images)
        if work == "train":
            logits.sum().backward()
    assert cost.flops(lowered(*case)) == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.usefixtures("full_compilation")
def test_a_training_step_moves_no_more_than_it_did_and_never_calls_the_host():
    """Of femnist's shape at width 16. A pass over activations more is 0.01 to 0.03 GB a pass."""
    program = lowered("femnist", "cxda", "train", width=16).compile(backend.compiler_options())
    analysis = program.cost_analysis()
    analysis = analysis[0] if isinstance(analysis, list) else analysis
    assert analysis["bytes accessed"] < 0.9e9
    assert program.memory_analysis().temp_size_in_bytes < 170e6
    calls = r"\b(infeed|outfeed|send|recv|host_callback|xla_python_cpu_callback|xla_ffi_python)\b"
    assert not re.search(calls, program.as_text())


def equations(jaxpr):
    """All equations, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def test_episodes_of_a_step_are_merged_into_one_convolution():
    """As many convolutions as for one episode, over as many times the images, and none of them grouped."""
    method, tx = build_method("cxda_loo"), make_optimizer("sgd", 0.01, 0.9, 1e-4)
    state = state_of_shapes(method, tx, 0, make_episode().support)

    def of(tasks):
        episodes = jax.tree.map(lambda *x: np.stack(x), *(make_episode(i) for i in range(tasks)))
        step = jax.make_jaxpr(functools.partial(loop.train_step, loop.Learner(method, tx, augment.Weak())))
        return [
            (np.prod(e.invars[0].aval.shape), e.params["feature_group_count"], e.params["batch_group_count"])
            for e in equations(step(state, episodes, KEY).jaxpr) if e.primitive.name == "conv_general_dilated"
        ]  # fmt: skip

    one, four = of(1), of(4)
    for (size, *_), (merged, *groups) in zip(one, four, strict=True):
        assert groups == [1, 1] and merged in (4 * size, size)  # images or their gradients; the kernel
    assert sum(merged == 4 * size for (size, *_), (merged, *_) in zip(one, four, strict=True)) > 5


def test_patch_to_patch_attention_never_holds_all_scores():
    with mock.patch.object(loop, "init_state", state_of_shapes):
        method, episodes, _ = prepare(Case("femnist", "cxda_p2p", "infer", width=16, support=1000))
    episode = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), episodes)
    variables = jax.eval_shape(method.init, KEY, episode.query)
    adapted = jax.eval_shape(method.adapt, variables, episode.support, KEY)
    program = jax.make_jaxpr(method.predict)(adapted, episode.query).jaxpr
    largest = max(v.aval.size for e in equations(program) for v in e.outvars if hasattr(v.aval, "size"))
    assert largest <= 1.1 * CHUNK < 20 * 16 * 8 * 16 * 1000
