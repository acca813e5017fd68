"""The suite of launch.benchmark that says where a training step's time goes on a CPU, whose profiler sees only dispatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cxda_jax import backend
from cxda_jax.nets.cnn import PADDINGS
from cxda_jax.nets.convolution import NUMBERS, convolve
from launch.measure import interleave, repeated, spread
from launch.suites import KEY, QUERY, SHAPES, SUPPORT, Case, Options, gemm_peaks, program, settings


def layers_suite(o: Options) -> None:
    """Each convolution of the CNN: forwards, its kernel's gradient, its input's, by XLA's convolution and by ours."""
    peak = gemm_peaks(o._replace(peer=None))["ours"]
    found: dict[str, Any] = {}
    images = 4 if o.small else SUPPORT + QUERY
    for name in (s for s in o.shapes if SHAPES[s].net == "cnn"):
        rows, (side, _, channels) = [], SHAPES[name].image
        for layer, pad in enumerate(PADDINGS["arm"]):
            rows += times(layer, (images, side, side, channels), o, pad, peak)
            side, channels = side + 2 * pad - 4, o.width
            side = side if layer == 0 else side // 2
        step = interleave({"step": program(Case(name, "bn", "train", width=o.width), o.small).timing}, o.repeats)[
            "step"
        ]
        ours = sum(row["median_ms"] for row in rows if row["by"] == "ours")
        found[name] = {"rows": rows, "step": spread(step), "outside_convolutions": 1 - ours / spread(step)["median_ms"]}
        print(
            f"{name}: step {spread(step)['median_ms']:.0f} ms, outside convolutions {found[name]['outside_convolutions']:.0%}"
        )
        o.keep({"settings": settings(o), "gemm_gflop_per_s": peak, "layers": found})


def times(layer: int, shape: tuple[int, ...], o: Options, pad: int, peak: float) -> list[dict[str, Any]]:
    x = jax.random.normal(KEY(0), shape)
    kernel = jax.random.normal(KEY(1), (5, 5, shape[-1], o.width))
    padding = ((pad, pad), (pad, pad))

    def plain(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=NUMBERS)

    def ours(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return convolve(x, kernel, (1, 1), padding, dimension_numbers=NUMBERS)

    grad = jnp.ones(jax.eval_shape(plain, x, kernel).shape)
    # Multiplications and additions that a convolution needs, those with padding left out where it has any.
    gflop = 2e-9 * grad.size * kernel.size / o.width
    work: dict[str, Callable[[Any], Callable[..., Any]]] = {
        "forward": lambda f: backend.jit(lambda x, k, g: f(x, k)),
        "gradient of the kernel": lambda f: backend.jit(lambda x, k, g: jax.vjp(lambda k: f(x, k), k)[1](g)),
        "gradient of the input": lambda f: backend.jit(lambda x, k, g: jax.vjp(lambda x: f(x, k), x)[1](g)),
    }
    rows = []
    for what, make in work.items():
        if layer == 0 and what == "gradient of the input":
            continue  # nobody asks for it
        programs = {"ours": make(ours), "xla": make(plain)}
        contenders = {by: repeated(lambda f=f: f(x, kernel, grad)) for by, f in programs.items()}
        for by, seconds in interleave(contenders, o.repeats).items():
            row = {"layer": layer, "what": what, "by": by, "gflop": gflop, **spread(seconds)}
            row["of_gemm_peak"] = 1e3 * gflop / row["median_ms"] / peak
            rows.append(row)
        print(
            f"conv{layer} {what:24}"
            + "".join(f"  {r['by']} {r['median_ms']:8.1f} ms {r['of_gemm_peak']:4.0%}" for r in rows[-2:]),
            flush=True,
        )
    return rows
