"""Random ops: each takes a key from the client's default generator; workers make values from (key, element index).

So they depend on the seed and the order of calls, never on mesh, placement or engine, and ``torch.manual_seed``, ``fork_rng``,
``get_rng_state`` and checkpointing work unpatched. An explicit CPU generator, and the setting ``random="torch"``, draw on the client
and are bit-equal to plain torch.
"""

from __future__ import annotations

from typing import Any

import torch

from ..placement import boxed
from ..program.ir import Local
from ..sharding import shapes
from ..sharding.builder import ArgWriter, Builder
from ..sharding.layout import stride_order
from ..sharding.spec import Spec
from ..tensor import Tensor
from . import aliasing, fresh, host, inserted, issuing, runtime, watch
from .handles import wrap

aten = torch.ops.aten

#: In-place fills: the device function that makes the values, and the op's own arguments it takes, with their defaults.
FILLS: dict[Any, tuple[str, tuple[tuple[str, Any], ...]]] = {
    aten.uniform_.default: ("dtorch.uniform", (("from", 0.0), ("to", 1.0))),
    aten.normal_.default: ("dtorch.normal", (("mean", 0.0), ("std", 1.0))),
    aten.exponential_.default: ("dtorch.exponential", (("lambd", 1.0),)),
    aten.geometric_.default: ("dtorch.geometric", (("p", None),)),
    aten.log_normal_.default: ("dtorch.log_normal", (("mean", 1.0), ("std", 2.0))),
    aten.cauchy_.default: ("dtorch.cauchy", (("median", 0.0), ("sigma", 1.0))),
    aten.bernoulli_.float: ("dtorch.bernoulli", (("p", 0.5),)),
}

#: Integer fills: argument names of the bounds.
INTEGER_FILLS: dict[Any, tuple[str | None, str | None]] = {
    aten.random_.default: (None, None),
    getattr(aten.random_, "from"): ("from", "to"),
    aten.random_.to: (None, "to"),
}

#: Functional ops that are a fill of a fresh tensor like their input.
LIKE: dict[Any, Any] = {
    aten.rand_like.default: (aten.uniform_.default, ()),
    aten.randn_like.default: (aten.normal_.default, ()),
    aten.randint_like.default: (getattr(aten.random_, "from"), ("low", "high")),
    aten.randint_like.low_dtype: (getattr(aten.random_, "from"), ("low", "high")),
    aten.bernoulli.p: (aten.bernoulli_.float, ("p",)),
}

#: Ops whose values need more than an element index: run whole on every device with a generator seeded by the key.
SEEDED = {
    aten.bernoulli.default,
    aten.bernoulli_.Tensor,
    aten.multinomial.default,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor,
    aten.poisson.default,
    aten.binomial.default,
    aten._standard_gamma.default,
    aten._sample_dirichlet.default,
    aten.native_dropout.default,
    aten.rrelu_with_noise.default,
    aten.rrelu_with_noise_.default,
    aten.rrelu_with_noise_functional.default,
}

RANDOM_OPS = {*FILLS, *INTEGER_FILLS, *LIKE, *SEEDED}


def draw_key() -> int:
    """A 62-bit key from the client's default generator."""
    recorder = watch.recorder()
    state = None if recorder is None else torch.get_rng_state()
    key = int(torch.empty((), dtype=torch.int64, device="cpu").random_(0, 1 << 62))
    if recorder is not None:
        recorder.key(key, state)
    return key


def run(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The dispatch handler of every random op."""
    target = args[0] if isinstance(args[0], torch.Tensor) else next(a for a in args if isinstance(a, torch.Tensor))
    result = host.run(info, args, kwargs)
    if result is not NotImplemented:
        return result
    mesh = host.mesh_of(args, kwargs)
    args, kwargs = host.place(info, args, kwargs, mesh)
    args, kwargs = _named_generator(info, args, kwargs)
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(f"{info.name}: expected a CPU generator, got one of {generator.device}")
    if generator is not None or runtime.controller().config.random == "torch":
        _tell_of_fetching(info, args, kwargs)
        return on_client(info, args, kwargs)
    if info.op in SEEDED:
        return seeded(info, args, kwargs)
    if info.op in LIKE:
        fill, names = LIKE[info.op]
        spec = target._spec
        dtype = kwargs.get("dtype") or spec.dtype
        values = {a.name: info.value_of(a, args, kwargs) for a in info.arguments}
        bounds = [values.get(name, 0) for name in names]
        # Made contiguous in the order of memory that the result will have, then turned.
        order = stride_order(tuple(spec.shape), _like_stride(spec, kwargs))
        shape = [spec.shape[dim] for dim in order]
        made = generate(fill, bounds, Spec.of(mesh, host.permuted(boxed(spec.placements), order), shape, None, dtype))
        return host.turned(made, order)
    names = INTEGER_FILLS.get(info.op) or [n for n, _ in FILLS[info.op][1]]
    values = {a.name: info.value_of(a, args, kwargs) for a in info.arguments}
    spec = target._spec
    _check(info.op, values, spec.dtype)
    source = generate(
        info.op, [values.get(n) if n else None for n in names], spec.with_placements(boxed(spec.placements))
    )
    aten.copy_.default(target, source)
    return target


def _named_generator(info: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The call with its generator, which some ops take by position, among ``kwargs``."""
    argument = info.by_name.get("generator")
    if argument is None or len(args) <= argument.position:
        return args, kwargs
    position = argument.position
    return (*args[:position], *args[position + 1 :]), {**kwargs, "generator": args[position]}


def _check(op: Any, values: dict[str, Any], dtype: torch.dtype) -> None:
    """torch's own errors for illegal parameters, from torch itself on an empty tensor."""
    named = {k: v for k, v in values.items() if k not in ("self", "generator") and v is not None}
    op(torch.empty(0, dtype=dtype, device="cpu"), *named.values())


def _like_stride(spec: Spec, kwargs: dict[str, Any]) -> tuple[int, ...]:
    plain = torch.empty_strided(spec.shape, spec.stride, device="meta")
    return torch.empty_like(plain, memory_format=kwargs.get("memory_format") or torch.preserve_format).stride()


def generate(fill: Any, arguments: list[Any], spec: Spec, key: int | None = None) -> Tensor:
    """A new tensor of ``spec`` filled as ``fill`` would with ``arguments``, from ``key`` or one that is drawn now."""
    if fill in INTEGER_FILLS:
        name = "dtorch.random_integers"
    else:
        name, defaults = FILLS[fill]
        arguments = [
            d if a is None else a for a, (_, d) in zip(arguments + [None] * len(defaults), defaults, strict=False)
        ]
    builder = Builder(spec.mesh, 0, 0)
    numbers = [builder.operand(draw_key() if key is None else key), *[builder.operand(a) for a in arguments]]
    return fresh.make(builder, name, numbers, spec)


def on_client(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Draw as plain torch does, on whole tensors here, and place the result where the input is."""
    watch.refuse(
        "random numbers are drawn on the client (random='torch', an explicit generator, or an op that needs whole tensors)"
    )
    mesh, like = None, None
    writes: list[tuple[Tensor, torch.Tensor]] = []

    def fetch(name: str, value: Any) -> Any:
        nonlocal mesh, like
        if type(value) is Tensor:
            spec = value._spec
            mesh = spec.mesh
            like = like or spec
            plain = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
            if info.op in SEEDED:
                plain.copy_(value.to_torch())
            if info.by_name[name].is_write:
                writes.append((value, plain))
            return plain
        return value

    named = [fetch(info.arguments[i].name, a) for i, a in enumerate(args)]
    result = info.op(*named, **{name: fetch(name, v) for name, v in kwargs.items() if name != "device"})
    for tensor, plain in writes:
        aten.copy_.default(tensor, host.from_plain(plain, mesh, boxed(tensor._spec.placements)))
    if info.returned_inputs:
        return args[0]

    def place(value: Any) -> Any:
        placements = boxed(like.placements) if tuple(value.shape) == tuple(like.shape) else None
        return host.from_plain(value, mesh, placements)

    return place(result) if isinstance(result, torch.Tensor) else tuple(place(r) for r in result)


def seeded(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A random op whose values need more than an element index: drawn from a generator seeded by one key."""
    has_generator = "generator" in info.by_name
    if has_generator and not info.is_mutable:
        return on_workers(info, args, {name: v for name, v in kwargs.items() if name != "generator"})
    _tell_of_fetching(info, args, kwargs)
    key = draw_key()
    if has_generator:
        return on_client(info, args, {**kwargs, "generator": torch.Generator().manual_seed(key)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key)
        return on_client(info, args, kwargs)


def _tell_of_fetching(info: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Its tensors' values are about to come to the client, as they would to every device; those that it writes go back."""
    if info.op not in SEEDED:
        return
    written = {a.name for a in info.written}
    named = [*zip([a.name for a in info.arguments], args, strict=False), *kwargs.items()]
    given = [(name, value._spec) for name, value in named if type(value) is Tensor]
    specs = [spec for _, spec in given]
    moves = [(spec, spec.replicate()) for spec in specs]
    moves += [(spec.replicate(), spec) for name, spec in given if name in written]
    if any(source is not target for source, target in moves):
        inserted.tell(info.name, specs, moves, True, None)
    aliasing.tell([value for _, value in named if type(value) is Tensor])


def on_workers(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Every device runs the op on whole inputs with a generator of the same seed, so that replicas agree."""
    from . import planning

    tensors: list[Tensor] = []
    numbers: list[Any] = []
    for argument, value in [
        *zip(info.arguments, args, strict=False),
        *((info.by_name[n], v) for n, v in kwargs.items()),
    ]:
        planning.collect(value, argument.is_number, tensors, numbers)
    metas, named = planning.with_metas(args, kwargs)
    mesh = tensors[0]._spec.mesh
    builder = Builder(mesh, len(tensors), len(numbers))
    whole = [t._spec.replicate() for t in tensors]
    slots = [
        i if t._spec is w else builder.reshard(i, t._spec, w)
        for i, (t, w) in enumerate(zip(tensors, whole, strict=True))
    ]
    moves = [(t._spec, w) for t, w in zip(tensors, whole, strict=True) if t._spec is not w]
    if moves:
        inserted.tell(info.name, [t._spec for t in tensors], moves, True, None)
    aliasing.tell(tensors)
    written, by_name = ArgWriter(info, builder, slots, {}).write(metas, named)
    specs = [
        Spec.of(mesh, whole[0].placements, *meta) for meta in shapes.infer(info.op, metas, named) if meta is not None
    ]
    outs = [builder.slot() for _ in specs]
    builder.body.append(Local("dtorch.seeded", [builder.operand(draw_key()), info.name, *written], by_name, outs))
    controller = runtime.controller()
    controller.mesh(mesh)
    program = controller.define(builder.program(info.name, outs))
    values = issuing.run(controller, program, tensors, specs, [*numbers, *builder.operands], info.name)
    results = [wrap(spec, value) for spec, value in zip(specs, values, strict=True)]
    return results[0] if info.structure == "tensor" else tuple(results)
