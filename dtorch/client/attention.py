"""``scaled_dot_product_attention`` on a sequence that several devices share: one program, with a gradient of its own.

torch hands the op over whole in two ways: under autograd through the dispatcher, where we stand in front of torch's own
(`dtorch.client.composites`), and under inference mode to `special`. Everything else about it stays torch's: what has no split
sequence, and what is not legal, goes to torch's own form, which composes it of smaller ops or raises its own error.
"""

from __future__ import annotations

import contextvars
import functools
import math
from typing import Any, NamedTuple

import torch

from ..errors import MeshMismatch
from ..sharding import attention as planning
from ..sharding import roles
from ..sharding.attention import Attention, AttentionPlan
from ..sharding.layout import stride_order
from ..sharding.plan import common_mesh
from ..sharding.spec import Spec
from ..tensor import Tensor
from . import aliasing, attention_composed, host, inserted, issuing, lines, random_ops, runtime, torch_internals
from .handles import wrap

aten = torch.ops.aten
OP = aten.scaled_dot_product_attention.default

#: Axis names of the innermost `dtorch.nn.SdpaOption`, each with what it insists on.
insisted: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("dtorch_sdpa_option", default={})  # noqa: B039


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's op, ours where the sequence is split."""
    if type(query) is Tensor and _is_ours(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
        return _attend(query, key, value, attn_mask, float(dropout_p), is_causal, scale)
    return torch_internals.compose(
        OP, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def run(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The dispatch handler, where the op arrives whole."""
    return scaled_dot_product_attention(*args, **kwargs)


def _is_ours(query: Any, key: Any, value: Any, mask: Any, dropout: float, is_causal: bool, enable_gqa: bool) -> bool:
    """Whether it is legal, and its sequence is split. (In inference mode dropout is always ours: torch's form draws other numbers.)"""
    if type(key) is not Tensor or type(value) is not Tensor:
        return False
    specs = [t._spec for t in (query, key, value)]
    if None in specs:
        return False
    q, k, v = (tuple(spec.shape) for spec in specs)
    # Queries that are split before whole keys need no ring: each device attends to them as it is.
    split = [roles.splits_sequence(spec) for spec in specs]
    if not (any(split[1:]) or (split[0] and (is_causal or dropout)) or (dropout and torch.is_inference_mode_enabled())):
        return False
    same = len(q) == len(k) == len(v) and len(q) >= 3 and q[:-3] == k[:-3] == v[:-3] and k[-3:-1] == v[-3:-1]
    if not same or q[-1] != k[-1] or math.prod(q) * math.prod(k) * math.prod(v) == 0:
        return False
    if q[-3] != k[-3] and not (enable_gqa and len(q) > 3 and q[-3] % k[-3] == 0):
        return False
    dtype = specs[0].dtype
    if not dtype.is_floating_point or any(s.dtype != dtype for s in specs) or not 0.0 <= dropout <= 1.0:
        return False
    if mask is None:
        return True
    scores = (*q[:-1], k[-2])
    fits = 2 <= mask.ndim <= len(scores) and all(
        m in (1, n) for m, n in zip(reversed(mask.shape), reversed(scores), strict=False)
    )
    # Only torch's fused kernel takes both.
    return (
        fits
        and mask.dtype in (torch.bool, dtype)
        and not (is_causal and not _is_fused(query, key, value, mask, dropout))
    )


def _is_fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float
) -> bool:
    """Whether torch on one device would run its fused kernel, as opposed to composing the op of others."""
    mask_has_gradient = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    takes_mask = mask is None or (mask.ndim in (2, 4) and not mask_has_gradient)
    takes_inputs = query.ndim == 4 and all(t.stride(-1) == 1 for t in (query, key, value))
    return takes_inputs and takes_mask and not dropout and query.shape[-1] == value.shape[-1]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    leading = query.shape[:-3]
    scores = (*query.shape[:-1], key.shape[-2])
    fused = _is_fused(query, key, value, mask, dropout)
    given = [t for t in (query, key, value, mask) if t is not None]
    saves = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    if saves and mask is not None and mask.requires_grad and type(mask) is not Tensor:
        # Placed by an op with a gradient, which a gradient of gradients needs to find its way back.
        mask = mask * host.from_plain(torch.ones((), dtype=mask.dtype), query._spec.mesh)
    if query.ndim > 4 and mask is not None and any(n != 1 for n in mask.shape[:-3]):
        mask = mask.expand(*leading, *mask.shape[-3:]).flatten(0, -4)
    elif mask is not None:
        mask = mask.reshape((1,) * max(0, 4 - mask.ndim) + tuple(mask.shape[-4 if query.ndim <= 4 else -3 :]))
        mask = mask if mask.ndim == 4 else mask.unsqueeze(0)
    if query.ndim != 4:
        query, key, value = (t.unsqueeze(0) if t.ndim == 3 else t.flatten(0, -4) for t in (query, key, value))
    keep, number = None, 0
    if dropout and runtime.controller().config.random == "torch":
        keep = _drawn(query, scores, dropout)
    elif dropout:
        number = random_ops.draw_key()
    numbers = (scale, dropout, number)
    out = _Attention.apply(query, key, value, mask, keep, is_causal, fused, saves, numbers, insisted.get())
    return out if len(leading) == 1 else out.reshape(*leading, *out.shape[1:])


def _drawn(query: Any, scores: tuple[int, ...], dropout: float) -> Tensor:
    """Which scores are kept, drawn as torch does, and split like the queries."""
    keep = torch.empty(scores, dtype=torch.float32, device="cpu").bernoulli_(1.0 - dropout).bool()
    spec = roles.whole_features(query._spec)
    return host.from_plain(keep.reshape(*query.shape[:3], scores[-1]), spec.mesh, spec.placements)


class _Attention(torch.autograd.Function):
    """The op and its gradient on 4-d tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        keep: Any,
        is_causal: bool,
        fused: bool,
        saves: bool,
        numbers: tuple[float, float, int],
        option: dict[str, str],
    ) -> Any:
        mesh = query._spec.mesh
        if mask is not None and (type(mask) is not Tensor or mask._spec is None):
            mask = _placed(mask, mesh)
        tensors = [query, key, value, *(t for t in (mask, keep) if t is not None)]
        specs = tuple(t._spec for t in tensors)
        try:
            common_mesh(OP, list(specs))
        except MeshMismatch as error:
            raise lines.with_line(error) from None
        names = mesh.mesh_dim_names or ()
        axes = tuple((names.index(name), what) for name, what in option.items() if name in names)
        ctx.call = _Call(specs, mask is not None, keep is not None, is_causal, bool(numbers[1]), axes, fused)
        ctx.numbers = numbers
        out, *lse = _run(_forward_plan, (ctx.call, saves), tensors, numbers)
        if saves:
            ctx.save_for_backward(*tensors, out, *lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        *tensors, out, lse = ctx.saved_tensors
        if type(grad) is not Tensor or grad._spec is None:
            grad = _placed(grad, out._spec.mesh)
        if torch.is_grad_enabled():  # create_graph=True
            count, call = 3 + ctx.call.has_mask, ctx.call
            keep = tensors[-1] if call.has_keep else None
            wanted = list(ctx.needs_input_grad[:count])
            given = attention_composed.gradients(tensors[:count], keep, grad, wanted, call.is_causal, ctx.numbers)
            return (*given, *[None] * (10 - count))
        wants_mask = ctx.needs_input_grad[3]
        key = (ctx.call, out._spec, lse._spec, grad._spec, wants_mask)
        found = _run(_backward_plan, key, [*tensors, out, lse, grad], ctx.numbers)
        return (*found[:3], found[3] if wants_mask else None, *[None] * 6)


def _placed(tensor: Any, mesh: Any) -> Any:
    """A plain or uncommitted tensor, replicated."""
    if type(tensor) is Tensor:
        host.commit(tensor, mesh)
        return tensor
    return host.from_plain(tensor, mesh)


class _Call(NamedTuple):
    """A call as its plans see it: all but its numbers. ``specs`` are of query, key, value, and of mask and keep if it has them."""

    specs: tuple[Spec, ...]
    has_mask: bool
    has_keep: bool
    is_causal: bool
    has_dropout: bool
    #: What `insisted` says of each axis.
    axes: tuple[tuple[int, str], ...]
    fused: bool

    def attention(self, is_backward: bool) -> Attention:
        given, insisted_on = self.specs[:3], dict(self.axes)
        query, key, _ = given
        chosen = roles.cheapest(roles.roles_of(*given, insisted_on), *given, insisted_on, is_backward)
        asked_for = roles.is_asked_for(given, insisted_on)
        return Attention(query.mesh, chosen, roles.sizes_of(query, key), self.is_causal, self.has_dropout, asked_for)

    def inputs(self) -> tuple[Spec, Spec, Spec, Spec | None, Spec | None]:
        """Specs of query, key, value, mask and keep."""
        query, key, value, *more = self.specs
        return query, key, value, more[0] if self.has_mask else None, more[-1] if self.has_keep else None


def _forward_plan(call: _Call, saves: bool) -> AttentionPlan:
    query = call.specs[0]
    # torch's fused kernel lays the output out as query is, its composed form does not.
    order = stride_order(tuple(query.shape), query.stride) if call.fused else [0, 1, 2, 3]
    return planning.forward(call.attention(is_backward=False), *call.inputs(), order, saves)


def _backward_plan(call: _Call, out: Spec, lse: Spec, grad: Spec, wants_mask: bool) -> AttentionPlan:
    return planning.backward(call.attention(is_backward=True), *call.inputs(), out, lse, grad, wants_mask)


@functools.lru_cache(maxsize=1024)
def _planned(make: Any, key: tuple) -> tuple[int, AttentionPlan]:
    """A plan and the number of its program, which the workers know."""
    controller = runtime.controller()
    plan = make(*key)
    controller.mesh(plan.outputs[0].mesh)
    return controller.define(plan.program), plan


def _run(make: Any, key: tuple, tensors: list[Any], numbers: tuple[float, float, int]) -> list[Tensor]:
    controller = runtime.controller()
    program, plan = _planned(make, key)
    if plan.moves:
        specs = [t._spec for t in tensors]
        inserted.tell("scaled_dot_product_attention", specs, plan.moves, False, None)
    aliasing.tell(tensors)
    operands = [*numbers, *plan.operands]
    values = issuing.run(controller, program, tensors, plan.outputs, operands, "scaled_dot_product_attention")
    return [wrap(spec, value) for spec, value in zip(plan.outputs, values, strict=True)]


runtime.on_close.append(_planned.cache_clear)
