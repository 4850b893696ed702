"""Pointwise ops: any dim may be sharded; pending sums pass through additive ones.

They do not pass through a product or quotient with another tensor: the sum 2 - 1 times inf is inf, but addend by addend it is
inf - inf. Nor through a number that enlarges the addends, which might overflow where the sum does not (`enlarges`). Nothing is
lost: a pending sum must be completed sooner or later, and once it is it stays so.
"""

from __future__ import annotations

import torch

from ...placement import PARTIAL, REPLICATE, Placement, shard
from ..strategy import Call, Rule, RuleEntry, Strategy, TensorArg, enlarges, rule

aten = torch.ops.aten

#: Tagged pointwise by torch, but not pointwise (equal) or random (rrelu).
NOT_POINTWISE = frozenset({aten.equal.default, aten.rrelu.default})


def shards(call: Call) -> list[Strategy]:
    """Each dim of the output; an input that broadcasts along it is replicated."""
    shape = next(o for o in call.outputs if o is not None).shape
    outputs = call.outputs
    found = []
    for dim in range(len(shape)):
        placed = shard(dim)
        inputs = tuple([broadcast(t, dim, shape) for t in call.inputs])
        found.append(Strategy(inputs, tuple([None if o is None else placed for o in outputs])))
    return found


def broadcast(tensor: TensorArg, dim: int, shape: tuple[int, ...]) -> Placement:
    """How an input that broadcasts to ``shape`` lies if ``dim`` of the result is sharded."""
    own = dim - (len(shape) - len(tensor.shape))
    return REPLICATE if own < 0 or tensor.shape[own] != shape[dim] else shard(own)


def pointwise(call: Call) -> list[Strategy]:
    out = call.kwargs.get("out")
    if out is not None and out.shape != call.outputs[0].shape:  # type: ignore[union-attr]
        return []  # torch resizes it, which only works on the whole tensor
    return shards(call)


ENTRY = RuleEntry(pointwise, {}, by_form=True)


def keeps_sums(call: Call, pending: tuple[int, ...]) -> bool:
    """Whether addends of the inputs ``pending`` may pass on their own: not if each would be rounded or wrapped to another type.

    Integers of one type are a ring, so they are exact; a cast to a narrower float, an integer or a bool must see the sum.
    """
    out = call.outputs[0].dtype  # type: ignore[union-attr]
    for i in pending:
        own = call.inputs[i].dtype
        if own == torch.bool or (own != out and not _widens(own, out)):
            return False
    return True


def _widens(source: torch.dtype, target: torch.dtype) -> bool:
    if min(source.itemsize, target.itemsize) == 1:  # float8: torch promotes it to nothing, not even to itself
        return False
    return (source.is_floating_point or source.is_complex) and torch.promote_types(source, target) == target


def additive(*pending: int, scale: str = "") -> Rule:
    """Pointwise; and sums pending in all of the inputs ``pending``, the others replicated, give pending sums.

    ``scale`` names an argument that, if it is a number, the addends are multiplied by.
    """

    def of(call: Call) -> list[Strategy]:
        found = shards(call)
        if max(pending) < len(call.inputs) and keeps_sums(call, pending) and not (scale and enlarges(call.get(scale))):
            inputs = tuple([PARTIAL if i in pending else REPLICATE for i in range(len(call.inputs))])
            found.append(Strategy(inputs, tuple([None if o is None else PARTIAL for o in call.outputs])))
        return found

    return of


rule(
    aten.neg.default,
    aten.neg_.default,
    aten.clone.default,
    aten.positive.default,
    aten._to_copy.default,
    aten.deg2rad.default,
    aten.zero_.default,
    by_form=True,
)(additive(0))
rule(aten.where.self, by_form=True)(additive(1, 2))
rule(aten.lerp.Scalar, aten.lerp_.Scalar, by_form=True)(additive(0, 1, scale="weight"))
#: A number as the second argument is added once, not once a device: only two tensors keep sums pending.
rule(aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor, by_form=True)(additive(0, 1, scale="alpha"))


@rule(aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar, aten.mul_.Scalar, by_form=True)
def mul(call: Call) -> list[Strategy]:
    """By a number no larger than 1, sums stay pending."""
    return _scaled(call, len(call.inputs) == 1 and not enlarges(call.get("other")))


@rule(aten.div.Tensor, aten.div_.Tensor, aten.true_divide.Tensor, aten.div.Scalar, aten.div_.Scalar, by_form=True)
def div(call: Call) -> list[Strategy]:
    """By a number larger than 1, sums stay pending."""
    return _scaled(call, len(call.inputs) == 1 and enlarges(call.get("other")))


def _scaled(call: Call, passes: bool) -> list[Strategy]:
    found = shards(call)
    if passes and keeps_sums(call, (0,)):
        found.append(Strategy((PARTIAL,), (PARTIAL,)))
    return found


@rule(aten.copy_.default, aten.copy.default, by_form=True)
def copy(call: Call) -> list[Strategy]:
    """The destination's old values do not matter, its placements do."""
    found = shards(call)
    if len(call.inputs) == 2 and keeps_sums(call, (1,)):  # not a number
        found.append(Strategy((PARTIAL, PARTIAL), (PARTIAL,)))
    return found


#: Backward ops that select where the gradient, their first argument, passes.
rule(
    aten.threshold_backward.default,
    aten.hardtanh_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardshrink_backward.default,
    aten.softshrink_backward.default,
    by_form=True,
)(additive(0))
rule(aten.leaky_relu_backward.default, by_form=True)(additive(0, scale="negative_slope"))

#: Pointwise ops that torch does not tag.
rule(
    aten.elu_backward.default,
    aten.hardswish_backward.default,
    aten.softplus_backward.default,
    aten.mish_backward.default,
    aten._prelu_kernel_backward.default,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.hardswish.default,
    aten.hardswish_.default,
    aten.gelu_.default,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.floor_divide_.Tensor,
    aten.floor_divide_.Scalar,
    aten.eq_.Scalar,
    aten.eq_.Tensor,
    aten.ne_.Scalar,
    aten.ne_.Tensor,
    aten.lt_.Scalar,
    aten.lt_.Tensor,
    aten.le_.Scalar,
    aten.le_.Tensor,
    aten.gt_.Scalar,
    aten.gt_.Tensor,
    aten.ge_.Scalar,
    aten.ge_.Tensor,
    aten.__and__.Scalar,
    aten.__and__.Tensor,
    aten.__or__.Scalar,
    aten.__or__.Tensor,
    aten.rsub.Tensor,
    aten.gcd_.default,
    aten.lcm_.default,
    aten.heaviside_.default,
    aten.copysign_.Tensor,
    aten.copysign_.Scalar,
    aten._prelu_kernel.default,
    aten.complex.default,
    aten.polar.default,
    aten.xlogy_.Scalar_Other,
    by_form=True,
)(pointwise)


@rule(aten.log_sigmoid_forward.default, by_form=True)
def log_sigmoid(call: Call) -> list[Strategy]:
    """The buffer has the input's shape on CPU and none on CUDA; then it is replicated (empty everywhere)."""
    ndim = call.inputs[0].ndim
    same = call.outputs[1] is not None and call.outputs[1].shape == call.inputs[0].shape
    return [Strategy((shard(d),), (shard(d), shard(d) if same else REPLICATE)) for d in range(ndim)]


@rule(aten.log_sigmoid_backward.default, by_form=True)
def log_sigmoid_backward(call: Call) -> list[Strategy]:
    """(grad, self, buffer); see `log_sigmoid` for the buffer."""
    grad, _, buffer = call.inputs
    same = buffer.shape == grad.shape
    return [Strategy((shard(d), shard(d), shard(d) if same else REPLICATE), (shard(d),)) for d in range(grad.ndim)]


@rule(aten.bucketize.Tensor, aten.isin.Tensor_Tensor, by_form=True)
def lookup(call: Call) -> list[Strategy]:
    """Pointwise in the first tensor; the second is a table."""
    return [Strategy((shard(d), REPLICATE), (shard(d),)) for d in range(call.inputs[0].ndim)]
