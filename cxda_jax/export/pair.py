"""The two functions of a model that programs of every format are made from, with named arrays as arguments and results.

encode(images, present) -> memory      whenever the buffer has changed
predict(memory, image) -> answers      for each new image

The buffer has a fixed number of places, and `present` says which of them hold an image. So one program serves every
fill of the buffer, from the empty one on.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax.device.model import Model, insist_on_places
from cxda_jax.disk.safetensors import named
from cxda_jax.types import Array, Images, Variables

Named = dict[str, Any]
Shapes = dict[str, jax.ShapeDtypeStruct]
FILLED = "filled"  # in a memory: which places held an image
DOMAINS = "domain"  # of the images of a memory: no method with places reads them, so no format carries them


class Pair(NamedTuple):
    """A model as two pure functions.

    Attributes:
      weights: all arrays that the functions need of the trained model.
      encode: (weights, {"images": uint8 [places, h, w, c], "present": float [places], 1 or 0}) -> memory.
      predict: (weights, {**memory, "image": uint8 [1, h, w, c]}) -> {"logits": [1, classes], "attention":
        [1, heads, places]}; the latter for methods that attend to images.
      buffer: shapes and types of what encode takes.
      memory: of what encode gives.
      asked: of what predict takes.
      answers: of what predict gives.
    """

    weights: Named
    encode: Callable[[Named, Named], Named]
    predict: Callable[[Named, Named], Named]
    buffer: Shapes
    memory: Shapes
    asked: Shapes
    answers: Shapes


def pair_of(model: Model, places: int) -> Pair:
    """The two functions of a model whose buffer has so many places. A UserError names a method that has none."""
    method, card = model.method, model.card
    insist_on_places(method, "export", "export another method")
    # A mask of floats: the runtimes of some formats know few operations on booleans.
    buffer = {
        "images": jax.ShapeDtypeStruct((places, *card.shape), model.dtype),
        "present": jax.ShapeDtypeStruct((places,), jnp.float32),
    }

    def adapt(variables: Variables, images: Array, present: Array) -> Any:
        mask = present > 0 if method.takes_places else None
        return method.adapt(variables, Images(images, jnp.zeros(places, jnp.int32), mask), jax.random.key(0))

    weights = named(model.variables)
    structure = jax.tree.structure(model.variables)
    like = jax.eval_shape(adapt, model.variables, *buffer.values())
    shapes = jax.tree_util.tree_leaves_with_path(like)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in shapes]
    given = passed_on(adapt, model.variables, *buffer.values())
    # What is neither a weight nor the same for all buffers is the memory.
    memory_of = {
        name: FILLED if name == "present" else name.removeprefix("variables/").replace("/", "_")
        for name, source in zip(names, given, strict=True)
        if source not in weights and name.split("/")[-1] != DOMAINS
    }

    def encode(weights: Named, inputs: Named) -> Named:
        adapted = adapt(jax.tree.unflatten(structure, weights.values()), inputs["images"], inputs["present"])
        whole = dict(zip(names, jax.tree.leaves(adapted), strict=True))
        memory = {kept: whole[name].astype(jnp.float32) for name, kept in memory_of.items()}
        return memory or {FILLED: 1.0 * inputs["present"]}  # formats want functions with a result

    def predict(weights: Named, inputs: Named) -> Named:
        def leaf(name: str, source: str | None, shape: Any) -> Array:
            if name in memory_of:
                return inputs[memory_of[name]].astype(shape.dtype)
            return weights[source] if source in weights else jnp.zeros(shape.shape, shape.dtype)

        leaves = [leaf(*known) for known in zip(names, given, jax.tree.leaves(like), strict=True)]
        adapted = jax.tree.unflatten(jax.tree.structure(like), leaves)
        query = Images(inputs["image"], jnp.zeros(len(inputs["image"]), jnp.int32))
        answers = {"logits": method.predict(adapted, query)}
        if method.attention:
            answers["attention"] = method.attention(adapted, query)
        return answers

    memory = jax.eval_shape(encode, weights, buffer)
    asked = {**memory, "image": jax.ShapeDtypeStruct((1, *card.shape), model.dtype)}
    return Pair(weights, encode, predict, buffer, memory, asked, jax.eval_shape(predict, weights, asked))


def passed_on(function: Callable[..., Any], *arguments: Any) -> list[str | None]:
    """For each array of the results: the name of the weight (the first argument) that it is without any change,
    or None."""
    traced = jax.make_jaxpr(function)(*arguments).jaxpr
    sources = dict(zip(traced.invars, named(arguments[0]), strict=False))  # the weights come first
    return [sources.get(out) if isinstance(out, type(traced.invars[0])) else None for out in traced.outvars]


def by_model(model: Model, support: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The model's own logits [m, classes] and attention [m, heads, n] for images uint8,
    with which a program is compared."""
    adapted, attention = model.adapt(support).adapted, model.programs.attention
    asked = model.as_images(queries)
    weights = None if attention is None else np.asarray(attention(adapted, asked))
    return np.asarray(model.programs.predict(adapted, asked)), weights
