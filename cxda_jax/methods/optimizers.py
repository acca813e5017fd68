"""The optimisers of trainings and of fine-tuning: sgd and adam as PyTorch has them, or a chain of optax's,
read from a text."""

import ast
import difflib
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cxda_jax.config.fields import lookup
from cxda_jax.errors import UserError, brief

OPTIMIZERS: dict[str, Callable[[float, float], optax.GradientTransformation]] = {  # (learning rate, momentum)
    "sgd": lambda rate, momentum: optax.sgd(rate, momentum or None),
    "adam": lambda rate, momentum: optax.adam(rate),
}
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
    """An optimiser of OPTIMIZERS; or, if there is a chain, read_chain()'s, in place of all that comes before it.

    Args:
      weight_decay: L2, which is added to the gradient as PyTorch does.
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

    The text is parsed, not run. Each call names a public function of optax that returns a transformation of gradients
    or a schedule. Arguments are numbers, texts, True, False, None, the name `steps`, such calls, and lists, tuples and
    dicts of these.

    Raises:
      UserError: it begins with the name `field`. The text is no such chain, or its updates need more than gradients and
        parameters, or would give parameters of another form.
    """
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"{len(text)} characters, {_LONGEST} at most")
        value = _value(ast.parse(text.strip(), mode="eval").body, steps)
        calls = value if type(value) is tuple else (value,)
        if not all(isinstance(call, optax.GradientTransformation) for call in calls):
            raise ValueError("it is not made of transformations of gradients alone")
        chain = optax.chain(*calls)
        _try_out(chain)
    except Exception as e:  # optax raises many kinds for wrong arguments
        said = brief(" ".join(str(e).split()) or type(e).__name__, 80)
        raise UserError(f"{field}={brief(repr(text), 40)}: {said}; write it as 'clip(1.0), adam(1e-3)'") from None
    # A training gives its state away to each step, so parameters that a chain's state remembers must be a copy.
    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.copy, chain.init(params)), chain.update)


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    """Optax's public functions that return a transformation of gradients or a schedule, by name."""
    kinds = (optax.GradientTransformation, optax.GradientTransformationExtraArgs, optax.Schedule)
    public = {name: f for name, f in vars(optax).items() if not name.startswith("_")}
    callables = {n: f for n, f in public.items() if inspect.isfunction(f) or isinstance(f, functools.partial)}
    return {name: f for name, f in callables.items() if inspect.signature(f).return_annotation in kinds}


def _value(node: ast.expr | None, steps: int) -> Any:
    """The value of a call of one of _functions(), of the name `steps`, of a literal, or of a collection of these."""
    match node:
        case ast.Call(ast.Name(name), arguments, keywords):
            if name not in _functions():
                near = "".join(difflib.get_close_matches(name, _functions(), n=1))
                raise ValueError(f"optax has no {brief(name, 30)}" + f", did you mean {near}?" * bool(near))
            named = {str(keyword.arg): _value(keyword.value, steps) for keyword in keywords}
            return _functions()[name](*(_value(argument, steps) for argument in arguments), **named)
        case ast.Name("steps"):
            return steps
        case ast.List(elements):
            return [_value(element, steps) for element in elements]
        case ast.Tuple(elements):
            return tuple(_value(element, steps) for element in elements)
        case ast.Dict(keys, values):
            return {_value(key, steps): _value(value, steps) for key, value in zip(keys, values, strict=True)}
        case ast.Constant(value) if value != math.inf:
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)) if value != math.inf:
            return -value
    raise ValueError(f"{brief(ast.unparse(node), 30) if node else '**'} is no call of optax, finite number or text")


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
