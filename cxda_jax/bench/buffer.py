"""What a device does with a buffer of images, and what it keeps of each: the suite `buffer` of cxda benchmark."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from cxda_jax import backend, train
from cxda_jax.bench.cases import FEW, OPTIMIZER, SUPPORT, Case, calibrated, random_episodes, random_store
from cxda_jax.bench.measure import Timing, interleave, repeated, show, spread
from cxda_jax.bench.rows import Options
from cxda_jax.config import Config, read
from cxda_jax.data.store import DomainStore
from cxda_jax.experiment import METHODS, build_method, build_net
from cxda_jax.methods import anytime, icrm
from cxda_jax.types import Array, Images, Method, Variables

Append = Callable[[Any, Array], Any]  # (buffer, image [h, w, c]) -> the buffer with the image


def buffer_suite(o: Options) -> None:
    """Times each method with the settings of configs/unipen.py. Rows of the record:

    adapt    a full buffer, anew
    take_in  one more image, until it counts. Where what is kept of an image depends on other images, this is adapt
    predict  one query, once adapted
    kept     bytes of what it adapted to, beside the network that was trained
    per_image, by which `kept` grows with an image
    """
    size, store = FEW if o.small else SUPPORT, random_store("femnist", domains=3, images=1)
    names = ("erm", "t3a", "cxda_any", "icrm") if o.small else METHODS
    for label in (*names, "cxda_any,prior=0"):
        name, _, running = label.partition(",")
        configs = {n: read(f"unipen:{name}") for n in (size, 2 * size)}
        for n, config in configs.items():
            config["icrm"]["context"] = n  # as many places as images
            config["cxda_any"]["prior"] *= not running
        o.add("buffer", {"method": label} | measure(name, configs, store, o))


def measure(name: str, configs: Mapping[int, Config], store: DomainStore, o: Options) -> dict[str, Any]:
    """The row of a method. `configs` are for buffers of two sizes, the smaller of which is timed."""
    methods, key = {n: build_method(config, store) for n, config in configs.items()}, jax.random.key(0)
    size, method = next(iter(methods.items()))
    case = Case("femnist", name, "infer")
    supports = {n: jax.tree.map(lambda x: x[0], random_episodes(case._replace(support=n)).support) for n in methods}
    state, episodes = train.init_state(method, OPTIMIZER, 0, supports[size]), random_episodes(case)
    variables, query = calibrated(method, state, episodes), jax.tree.map(lambda x: x[0, :1], episodes.query)
    adapt, predict = backend.jit(method.adapt), backend.jit(method.predict)
    adapted = adapt(variables, supports[size], key)
    timings: dict[str, Timing] = {"predict": repeated(lambda: predict(adapted, query))}
    row: dict[str, Any] = {"images": size, "kept": 0, "per_image": 0}
    if method.uses_support:
        timings["adapt"] = repeated(lambda: adapt(variables, supports[size], key))
        if stream := stream_of(method, configs[size], store, variables, adapted, size):
            append, buffer = backend.jit(stream[0]), stream[1]
            timings["take_in"] = repeated(lambda: append(buffer, query.pixels[0]))
        kept = [bytes_kept(methods[n], supports[n]) for n in methods]
        row |= {"kept": kept[0], "per_image": (kept[1] - kept[0]) // size}
    for part, seconds in interleave(timings, o.repeats).items():
        row[part] = show(f"{name} {part}", spread(seconds))
    return {**row, "take_in": row.get("take_in", row.get("adapt"))}


def stream_of(
    method: Method, config: Config, store: DomainStore, variables: Variables, adapted: Any, places: int
) -> tuple[Append, Any] | None:
    """How a method takes in one image, and a buffer for it; None if it must adapt anew."""
    if method.name == "cxda_any" and not config["cxda_any"]["prior"]:
        form = anytime.stream(method)
        return form.append, form.empty(variables, jnp.asarray(store.images[0]), places)
    if method.name == "icrm":
        net = icrm.with_transformer(build_net(config, store), **config["icrm"])
        return lambda buffer, image: icrm.append(net, buffer, image), adapted
    return None


def bytes_kept(method: Method, support: Images) -> int:
    """Bytes of what adapt() makes. What it only hands on, such as weights that stay as they are, does not count."""
    key = jax.random.key(0)
    variables = jax.eval_shape(method.init, key, support)
    if method.calibrate:
        variables = jax.eval_shape(method.calibrate, variables, support.pixels)
    program = jax.make_jaxpr(method.adapt)(variables, support, key).jaxpr
    made = {x for x in program.outvars if not isinstance(x, jax.extend.core.Literal)} - set(program.invars)
    return sum(x.aval.size * x.aval.dtype.itemsize for x in made)  # type: ignore[attr-defined]
