"""One call, made twice: on plain torch, then on the tested tensors under one layout after another."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from . import rounding
from .adapters import Adapter
from .compare import Tolerance, difference, no_worse, stride_difference
from .outcome import Outcome
from .placements import MESHES, Code, codes, layouts
from .samples import Sample

SECONDS = 60
"""A check that takes longer than this has hung."""

Place = Callable[[torch.Tensor], torch.Tensor]
Body = Callable[[Place], Any]
"""Makes the call on tensors that it has passed through the given function; returns everything to be compared."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """What is crossed with what."""

    meshes: tuple[str, ...]
    variants: tuple[str, ...]
    checks: tuple[str, ...]
    sample_limit: int = 4
    dtypes: tuple[str, ...] = ()
    strides: bool = False
    """Compare strides too."""
    trace: bool = False
    """Print the traceback of everything that raises."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A call to be compared, and how the outcome is to be labelled."""

    name: str
    kind: str
    body: Body
    tensors: list[torch.Tensor]
    dtype: str = ""
    sample: int = 0
    values: bool = True
    strides: bool = True
    """They may be compared: not where autograd picks its formulas by whether a tensor is of a subclass."""
    floor: Tolerance = (0.0, 0.0)
    plain_too: bool = True
    """It holds of plain tensors among the arguments: not that these share memory with results, which have copies of them."""

    def outcome(self, status: str, mesh: str = "", variant: str = "", detail: str = "") -> Outcome:
        return Outcome(self.name, status, self.kind, self.dtype, self.sample, mesh, variant, detail)


class TookTooLong(Exception):
    """A check ran into `SECONDS`."""


def compare(check: Check, adapter: Adapter, grid: Grid) -> Iterator[Outcome]:
    """The outcome of ``check`` on every mesh and under every distinct layout of its tensors."""
    plain = _PlainPlacer()
    expected, drew, problem = _expected(check, plain)
    if problem:
        yield check.outcome("skipped", detail=problem)
        return
    written = plain.written(check.tensors)
    values = check.values and (adapter.same_random or not drew) and _repeats(check, expected)
    placed = check.tensors or [leaf for leaf in tree_flatten(expected)[0] if isinstance(leaf, torch.Tensor)][:1]
    for mesh in grid.meshes:
        shape = MESHES[mesh]
        refused = () if check.tensors else ("partial", "mixed", "plain")
        if not check.plain_too or any(index > 0 for index in written):
            refused += ("plain",)  # a plain tensor is not written by an op on distributed ones, but for the clear error
        variants = tuple(v for v in grid.variants if v not in refused)
        for layout, variant in layouts(variants, placed, len(shape)).items():
            exact = shape == (1,) or all(one is None or set(one) == {"r"} for one in layout)
            try:
                with _time_limit(), _seeded():
                    placer = _Placer(adapter, shape, layout, variant)
                    result = check.body(placer)
                    handles = result, [placer.made[index] for index in written]
                    got = _bring(adapter, handles)
            except Exception as error:
                if grid.trace:
                    where = check.outcome("raised", mesh, variant).where()
                    print(f"--- {where}: {_short(placed)} {layout}\n{traceback.format_exc()}")
                adapter.recover()
                yield check.outcome("raised", mesh, variant, first_line(error))
                continue
            # Autograd picks some formulas by whether a tensor is of a subclass, and they round in other places.
            bit_for_bit = exact and check.kind not in ("backward", "gradgrad")
            found = difference(expected, got, exact=exact, values=values, floor=check.floor)
            if (
                found
                and found[0] == "wrong"
                and not bit_for_bit
                and _as_near_the_truth(check, expected, got, written, shape, any("p" in one for one in layout if one))
            ):
                found = None
            if found and found[0] == "wrong" and not bit_for_bit and _is_undetermined(check, expected):
                found = "skipped", "plain torch's own result is another when the inputs change by one rounding"
            # What comes as a pending sum has been added up, and lost its strides, on its way there.
            as_given = grid.strides and check.strides and variant not in ("partial", "mixed")
            if found is None and as_given and (steps := stride_difference(expected, handles)):
                found = "wrong", steps
            yield check.outcome(*(found[0], mesh, variant, found[1]) if found else ("ok", mesh, variant))


def _short(tensors: list[torch.Tensor]) -> str:
    return ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors)


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


class _Placer:
    """Distributes a check's tensors, one call each, in order; what comes after them is laid out by the variant's rule."""

    def __init__(self, adapter: Adapter, mesh_shape: tuple[int, ...], layout: tuple, variant: str) -> None:
        self.adapter, self.mesh_shape, self.layout, self.variant = adapter, mesh_shape, layout, variant
        self.made: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self.made.append(self._place(tensor, len(self.made)))
        return self.made[-1]

    def _place(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        if index < len(self.layout):
            chosen = self.layout[index]
        else:
            chosen = codes(
                "first" if self.variant in ("plain", "mixed") else self.variant, index, tensor, len(self.mesh_shape)
            )
        if chosen is None:
            return tensor.detach().clone()
        return self.adapter.distribute(tensor.detach().clone(), self.mesh_shape, chosen)

    def factory(self, function: Callable) -> Callable:
        """``function`` giving its result in the layout of this check."""
        whole: tuple[Code, ...] = ("r",) * len(self.mesh_shape)
        return self.adapter.factory(function, self.mesh_shape, self.layout[0] if self.layout else whole)

    def layout_of(self, tensor: torch.Tensor) -> object:
        return self.adapter.layout(tensor)

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        return self.adapter.fetch(value)


class _PlainPlacer:
    """The same calls on plain tensors."""

    def __init__(
        self, precision: torch.dtype | None = None, scales: Mapping[int, torch.Tensor] | None = None, nudge: int = 0
    ) -> None:
        self.made: list[torch.Tensor] = []
        self.precision = precision
        self.nudge = nudge
        self.scales = scales or {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone()
        if self.precision and copy.is_floating_point():
            copy = copy.to(self.precision)
        if self.nudge and (copy.is_floating_point() or copy.is_complex()):
            copy.mul_(1 + self.nudge * torch.finfo(copy.dtype).eps)
        if len(self.made) in self.scales:
            copy.mul_(self.scales[len(self.made)])
        self.made.append(copy)
        return copy

    def written(self, tensors: list[torch.Tensor]) -> list[int]:
        """Which of ``tensors`` the call has changed (some ops do without saying so in the version counter)."""
        pairs = enumerate(zip(tensors, self.made, strict=False))
        return [index for index, (before, now) in pairs if difference(before, now, exact=True) is not None]

    def factory(self, function: Callable) -> Callable:
        return function

    def layout_of(self, tensor: torch.Tensor) -> object:
        return None

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        return value.detach()


def _expected(check: Check, place: _PlainPlacer) -> tuple[Any, bool, str]:
    """What plain torch gives (the result, then the arguments that it changed), whether it drew random numbers, and why there
    is nothing to compare (or "")."""
    try:
        with _seeded():
            before = torch.get_rng_state()
            result = check.body(place)
            result = result, [place.made[index] for index in place.written(check.tensors)]
            drew = not torch.equal(before, torch.get_rng_state())
    except Exception as error:
        return None, False, f"plain torch: {first_line(error)}"
    if any(isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided for leaf in tree_flatten(result)[0]):
        return None, False, "the result is not strided: out of scope"
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, result), drew, ""


def _repeats(check: Check, expected: Any) -> bool:
    """Whether plain torch gives the same again."""
    with _seeded():
        place = _PlainPlacer()
        result = check.body(place)
        return (
            difference(expected, (result, [place.made[i] for i in place.written(check.tensors)]), exact=False) is None
        )


def _as_near_the_truth(
    check: Check, expected: Any, got: Any, written: list[int], mesh_shape: tuple[int, ...], pending: bool
) -> bool:
    """Whether a half-precision result is about as near the same call in float64 as plain torch is, or as near as the
    rounding of a split sum's addends allows: where a sum cancels, two right answers may be far apart.
    """
    if not any(isinstance(leaf, torch.Tensor) and leaf.dtype in rounding.HALVES for leaf in tree_flatten(expected)[0]):
        return False
    placed: list[torch.Tensor] = []

    def run(index: int, scale: torch.Tensor | None) -> Any:
        place = _PlainPlacer(torch.float64, {} if scale is None else {index: scale})
        with _seeded():
            result = check.body(place)
        placed[:] = place.made
        return result, [place.made[index] for index in written]

    try:
        truth = run(0, None)
    except Exception:
        return False  # the call has no such form
    if no_worse(truth, expected, got):
        return True
    return no_worse(truth, expected, got, rounding.allowance(run, list(placed), mesh_shape, pending))


def _is_undetermined(check: Check, expected: Any) -> bool:
    """Whether a gradient is another one if the inputs change by one rounding: singular vectors of complex matrices have a phase that
    LAPACK picks, and a loss that depends on it has no second derivative.

    Gradients only: what an op itself makes of a value at a jump (floor) it makes of it everywhere.
    """
    if check.kind not in ("backward", "gradgrad"):
        return False
    for sign in (1, -1):
        place = _PlainPlacer(nudge=sign)
        with _seeded():
            result = check.body(place)
        # What an in-place call wrote is compared elsewhere: here every argument has changed.
        found = difference(expected[0], result, exact=False)
        if found is not None and found[0] == "wrong":
            return True
    return False


def _bring(adapter: Adapter, result: Any) -> Any:
    return tree_map(lambda leaf: adapter.fetch(leaf) if isinstance(leaf, torch.Tensor) else leaf, result)


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(11)
        yield


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(signum: int, frame: object) -> None:
        raise TookTooLong(f"no result within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def gradients(
    outputs: Any, inputs: list[torch.Tensor], place: Place, create_graph: bool = False
) -> list[torch.Tensor | None]:
    """The gradients of ``inputs`` for fixed, uneven gradients of every differentiable tensor in ``outputs``."""
    reached = [out for out in tree_flatten(outputs)[0] if isinstance(out, torch.Tensor) and out.requires_grad]
    if not reached:
        raise RuntimeError("no output needs a gradient")
    came_in = [place(_cotangent(out)) for out in reached]
    return list(torch.autograd.grad(reached, inputs, came_in, allow_unused=True, create_graph=create_graph))


def _cotangent(out: torch.Tensor) -> torch.Tensor:
    flat = torch.linspace(-1.0, 1.5, max(out.numel(), 1), dtype=torch.float64)[: out.numel()]
    return flat.reshape(out.shape).to(out.dtype)


def arguments(sample: Sample, place: Place, requires_grad: bool = False) -> tuple[tuple, dict[str, Any]]:
    """A fresh copy of a sample's arguments, placed; leaves where ``requires_grad`` and the sample says so."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        placed = place(tensor)
        return placed.requires_grad_() if requires_grad and tensor.requires_grad else placed

    return sample.convert(one)
