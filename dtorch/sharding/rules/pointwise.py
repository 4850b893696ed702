"""Pointwise ops: any dim may be sharded; pending sums pass through linear ones."""

from __future__ import annotations

import torch

from ...placement import PARTIAL, REPLICATE, Placement, shard
from ..strategy import Call, Rule, RuleEntry, Strategy, TensorArg, rule

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


ENTRY = RuleEntry(pointwise, {})


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
    return (source.is_floating_point or source.is_complex) and torch.promote_types(source, target) == target


def linear(*pending: tuple[int, ...]) -> Rule:
    """Pointwise, and for each of ``pending``: sums pending in those inputs at once, the others replicated, give pending sums."""

    def of(call: Call) -> list[Strategy]:
        found = shards(call)
        outputs = tuple([None if o is None else PARTIAL for o in call.outputs])
        for which in pending:
            if max(which) < len(call.inputs) and keeps_sums(call, which):
                inputs = tuple([PARTIAL if i in which else REPLICATE for i in range(len(call.inputs))])
                found.append(Strategy(inputs, outputs))
        return found

    return of


#: Linear in the one tensor, or (of two, the second a replicated factor) in either.
rule(
    aten.neg.default,
    aten.neg_.default,
    aten.clone.default,
    aten.positive.default,
    aten._to_copy.default,
    aten.mul.Scalar,
    aten.mul_.Scalar,
    aten.div.Scalar,
    aten.div_.Scalar,
    aten.deg2rad.default,
    aten.rad2deg.default,
    aten.zero_.default,
)(linear((0,)))
rule(aten.mul.Tensor, aten.mul_.Tensor)(linear((0,), (1,)))
rule(aten.div.Tensor, aten.div_.Tensor, aten.true_divide.Tensor)(linear((0,)))
rule(aten.addcmul.default, aten.addcmul_.default)(linear((0, 1), (0, 2)))
rule(aten.addcdiv.default, aten.addcdiv_.default)(linear((0, 1)))
rule(aten.lerp.Scalar, aten.lerp_.Scalar, aten.lerp.Tensor, aten.lerp_.Tensor)(linear((0, 1)))
rule(aten.where.self)(linear((1, 2)))


@rule(aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor)
def add(call: Call) -> list[Strategy]:
    """A number as the second argument is added once, not once a device: only two tensors keep sums pending."""
    found = shards(call)
    if len(call.inputs) == 2 and keeps_sums(call, (0, 1)):
        found.append(Strategy((PARTIAL, PARTIAL), (PARTIAL,)))
    return found


@rule(aten.copy_.default, aten.copy.default)
def copy(call: Call) -> list[Strategy]:
    """The destination's old values do not matter, its placements do."""
    found = shards(call)
    if keeps_sums(call, (1,)):
        found.append(Strategy((PARTIAL, PARTIAL), (PARTIAL,)))
    return found


#: Backward ops: linear in the gradient, their first argument.
rule(
    aten.threshold_backward.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten.sigmoid_backward.default,
    aten.tanh_backward.default,
    aten.elu_backward.default,
    aten.leaky_relu_backward.default,
    aten.hardtanh_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default,
    aten.hardshrink_backward.default,
    aten.softshrink_backward.default,
    aten.softplus_backward.default,
    aten.mish_backward.default,
    aten.logit_backward.default,
    aten.native_dropout_backward.default,
    aten._prelu_kernel_backward.default,
)(linear((0,)))

#: Pointwise ops that torch does not tag.
rule(
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
)(pointwise)


@rule(aten.log_sigmoid_forward.default)
def log_sigmoid(call: Call) -> list[Strategy]:
    """The buffer has the input's shape on CPU and none on CUDA; then it is replicated (empty everywhere)."""
    ndim = call.inputs[0].ndim
    same = call.outputs[1] is not None and call.outputs[1].shape == call.inputs[0].shape
    return [Strategy((shard(d),), (shard(d), shard(d) if same else REPLICATE)) for d in range(ndim)]


@rule(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(call: Call) -> list[Strategy]:
    """(grad, self, buffer); see `log_sigmoid` for the buffer."""
    grad, _, buffer = call.inputs
    same = buffer.shape == grad.shape
    return [Strategy((shard(d), shard(d), shard(d) if same else REPLICATE), (shard(d),)) for d in range(grad.ndim)]


@rule(aten.bucketize.Tensor, aten.isin.Tensor_Tensor)
def lookup(call: Call) -> list[Strategy]:
    """Pointwise in the first tensor; the second is a table."""
    return [Strategy((shard(d), REPLICATE), (shard(d),)) for d in range(call.inputs[0].ndim)]
