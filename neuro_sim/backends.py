"""What can run a bundle: BACKENDS, a table of functions from a model to a `Decoder`, and which one is the default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spikeopd.errors import BackendMissing, ConfigError

if TYPE_CHECKING:
    from neuro_sim.decode import Decoder
    from spikeopd.contracts import ModelShape, Precision, SpikeModel
    from spikeopd.contracts.bundle import Place

LAVA_SMALL = 4_000_000  # int8 weights up to which Lava is the default where it is installed
MAX_THREADS = 256


@dataclass(frozen=True)
class Running:
    """How to run; each backend reads what concerns it.

    threads    of the event engine; None: all cores, or one for a small model
    precision  Lava runs an integer model as its float twin if this is float32; None: as the model is
    timeout    seconds Lava or SANA-FE may take for one token, and Lava to build each of its processes
    """

    threads: int | None = None
    precision: Precision | None = None
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"--threads must be at least 1 and at most {MAX_THREADS}, got {self.threads}")
        if not self.timeout > 0:
            raise ConfigError(f"--timeout must be more than 0 seconds, got {self.timeout}")


@dataclass(frozen=True)
class Backend:
    """about: a few words for --help; place: moves a bundle's arrays as they are loaded (see `load_bundle`)."""

    about: str
    open: Callable[[SpikeModel, Running], Decoder]
    place: Place | None = None


def event(model: SpikeModel, running: Running) -> Decoder:
    from neuro_sim.event.engine import EventDecoder

    try:
        return EventDecoder(model, threads=running.threads)
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise ConfigError(f"--threads {running.threads}: this machine does not allow so many; give fewer") from error


def event_place(shape: ModelShape, precision: Precision, arrays: dict[str, Any]) -> None:
    from neuro_sim.event.plan import place_weights

    place_weights(shape, precision, arrays)


def lava(model: SpikeModel, running: Running) -> Decoder:
    from neuro_sim.lava.compat import require_lava

    require_lava()
    from neuro_sim.lava.decoder import LavaDecoder

    fixed = (running.precision or model.precision) != "float32"
    return LavaDecoder(model, precision="fixed" if fixed else "float", timeout=running.timeout)


def sanafe(model: SpikeModel, running: Running) -> Decoder:
    from neuro_sim.sanafe.decoder import NetworkDecoder
    from neuro_sim.sanafe.process import ChipProcess, find_python

    find_python()  # says how to get it, before anything is built
    return NetworkDecoder(model, lambda network: ChipProcess(network, running.timeout))


def dense(model: SpikeModel, running: Running) -> Decoder:
    from neuro_sim.graded import oracle

    return oracle(model)


def pick_backend(
    shape: ModelShape, stored: Precision, backend: str | None = None, precision: Precision | None = None
) -> tuple[str, str]:
    """(name, why it is not the one that was asked for) for a bundle with arrays of precision `stored`."""
    reason = ""
    if backend is None and shape.graded:
        backend, reason = "dense", "the bundle is a quantised twin, which no other backend runs"
    elif backend is None:
        backend, reason = _default_backend(shape)
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is not known; choose one of {', '.join(BACKENDS)}")
    if shape.graded and backend != "dense":
        from neuro_sim.graded import refuse_graded

        refuse_graded(backend)
    if precision in ("int8", "int4") and stored != precision:
        raise ConfigError(
            f"--precision {precision} needs an integer bundle with such weights, this one holds {stored}; drop the "
            f"option, or export with --precision {precision}"
        )
    if precision == "float32" and stored != "float32" and backend != "lava":
        raise ConfigError("--precision float32 with an integer bundle runs on Lava only; add --backend lava")
    if backend == "sanafe" and stored == "float32":
        raise ConfigError("--backend sanafe runs integers and this bundle is float32; export it with --precision int8")
    if backend == "event" and stored == "float32":
        return "dense", "the event engine is for integers and this bundle is float32"
    return backend, reason


def _default_backend(shape: ModelShape) -> tuple[str, str]:
    d, f = shape.hidden_size, shape.ffn_dim
    weights = shape.num_hidden_layers * (4 * d * d + 2 * d * f) + shape.vocab_size * shape.word_embed_proj_dim
    if weights > LAVA_SMALL:
        return "event", f"the model has {weights / 1e6:.1f} M weights, too many for Lava's pace"
    try:
        from neuro_sim.lava.compat import require_lava

        require_lava()
    except (ImportError, BackendMissing) as error:
        return "event", str(error)
    small = f"Lava is installed and the model is small ({weights / 1e6:.2f} M weights)"
    return "lava", f"{small}; --backend event is faster"


BACKENDS: dict[str, Backend] = {
    "event": Backend("compiled and fast", event, event_place),
    "lava": Backend("Lava processes", lava),
    "dense": Backend("the slow oracle", dense),
    "sanafe": Backend("SANA-FE's simulated Loihi, if it is installed", sanafe),
}
