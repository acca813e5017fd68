"""The optimisers of trainings and of fine-tuning: sgd and adam as PyTorch has them, or a chain of optax's,
read from a text."""

import ast
import difflib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cxda_jax.errors import UserError, brief
from cxda_jax.fields import lookup

OPTIMIZERS: dict[str, Callable[[float, float], optax.GradientTransformation]] = {  # (learning rate, momentum)
    "sgd": lambda rate, momentum: optax.sgd(rate, momentum or None),
    "adam": lambda rate, momentum: optax.adam(rate),
}
STEPS = "steps"  # the name in a chain's text that stands for the number of steps
_LONGEST = 1000  # characters of a chain's text; the parser needs much memory and stack for long ones


def make_optimizer(
    name: str,
    learning_rate: float,
    momentum: float,
    weight_decay: float,
    chain: str = "",
    steps: int = 1,
    share: float = 1.0,
) -> optax.GradientTransformation:
    """An optimiser of OPTIMIZERS, or read_chain()'s if there is a chain, which
    then takes the place of all other options.

    Args:
      name: of the optimiser.
      learning_rate: its rate.
      momentum: of sgd.
      weight_decay: L2, which is added to the gradient as PyTorch does.
      chain: as read_chain() takes it.
      steps: the number of steps that the chain may name.
      share: by which the rate, or each update of the chain, is multiplied.
    """
    if chain:
        read = read_chain("optimizer.chain", chain, steps)
        return read if share == 1 else optax.chain(read, optax.scale(share))
    optimizer = lookup("optimizer.name", name, OPTIMIZERS)(learning_rate * share, momentum)
    return optax.chain(optax.add_decayed_weights(weight_decay), optimizer)


def read_chain(field: str, text: str, steps: int) -> optax.GradientTransformation:
    """The chain that a text such as 'clip_by_global_norm(1.0), adamw(cosine_decay_schedule(1e-3, steps))' names.

    The text is parsed, not run. Each call names a function of optax that returns a transformation of
    gradients. Arguments are numbers, texts, True, False, None, the name `steps`, calls of optax's
    schedules, and lists, tuples and dicts of these.

    Raises:
      UserError: it begins with the name `field`. The text is no such chain, or its updates need more than gradients and
        parameters, or would give parameters of another form.
    """
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"{len(text)} characters, {_LONGEST} at most")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a message must stay one line
            tree = ast.parse(text.strip(), mode="eval").body
            calls = tree.elts if isinstance(tree, ast.Tuple) and tree.elts else [tree]
            chain = optax.chain(*(_called(call, transformations(), "transformation", steps) for call in calls))
            _try_out(chain)
        # A training gives its state away to each step, so parameters that a chain's state remembers must be a copy.
        return optax.GradientTransformation(lambda params: jax.tree.map(jnp.copy, chain.init(params)), chain.update)
    except Exception as e:  # optax raises many kinds for wrong arguments
        said = brief(" ".join(str(e).split()) or type(e).__name__, 80)
        raise UserError(f"{field}={brief(repr(text), 40)}: {said}; write it as 'clip(1.0), adam(1e-3)'") from None


@functools.cache
def transformations() -> Mapping[str, Callable[..., Any]]:
    """Optax's public functions that return a transformation of gradients, by name."""
    return _that_return(optax.GradientTransformation, optax.GradientTransformationExtraArgs)


@functools.cache
def schedules() -> Mapping[str, Callable[..., Any]]:
    """Optax's public functions that return a schedule, by name."""
    return _that_return(optax.Schedule)


def _that_return(*kinds: Any) -> Mapping[str, Callable[..., Any]]:
    public = {name: value for name, value in vars(optax).items() if not name.startswith("_")}
    callables = {n: f for n, f in public.items() if inspect.isfunction(f) or isinstance(f, functools.partial)}
    return {name: f for name, f in callables.items() if inspect.signature(f).return_annotation in kinds}


def _called(node: ast.expr, functions: Mapping[str, Callable[..., Any]], what: str, steps: int) -> Any:
    """The result of a call of one of these functions."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"{_shown(node)} is no call")
    name = node.func.id
    if name not in functions:
        near = "".join(difflib.get_close_matches(name, functions, n=1))
        raise ValueError(f"optax has no {what} {brief(name, 30)}" + f", did you mean {near}?" * bool(near))
    named = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError(f"**{_shown(keyword.value)} is no argument")
        named[keyword.arg] = _argument(keyword.value, steps)
    return functions[name](*(_argument(argument, steps) for argument in node.args), **named)


def _argument(node: ast.expr, steps: int) -> Any:
    if isinstance(node, ast.Call):
        return _called(node, schedules(), "schedule", steps)
    if isinstance(node, ast.Name) and node.id == STEPS:
        return steps
    if isinstance(node, ast.List | ast.Tuple):
        values = [_argument(element, steps) for element in node.elts]
        return values if isinstance(node, ast.List) else tuple(values)
    if isinstance(node, ast.Dict) and all(node.keys):
        keys = [_argument(key, steps) for key in node.keys if key]
        return dict(zip(keys, (_argument(value, steps) for value in node.values), strict=True))
    try:
        value = ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{_shown(node)} is no number, text, {STEPS} or schedule") from None
    if isinstance(value, int | float) and not abs(value) < math.inf:
        raise ValueError(f"{_shown(node)} is not finite")
    return value


def _try_out(chain: optax.GradientTransformation) -> None:
    """Raises a ValueError where a step would give a state or parameters of another form. Nothing is computed."""
    params = {"kernel": jnp.zeros((3, 4)), "bias": jnp.zeros(4)}

    def step(params: Any, state: Any) -> Any:
        updates, state = chain.update(params, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(chain.init, params)
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.extended) for leaf in jax.tree.leaves(state)):
        raise ValueError("its state holds random keys, which no checkpoint keeps")
    before = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (params, state))
    if jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), jax.eval_shape(step, params, state)) != before:
        raise ValueError("a step changes the form of the parameters or of its state")


def _shown(node: ast.expr) -> str:
    return brief(ast.unparse(node), 30)
