"""Pooling, resampling, padding of images: leading dims (batch, channels) are independent."""

from __future__ import annotations

import dataclasses

import torch

from ...placement import PARTIAL, REPLICATE, shard
from ..strategy import Call, Rule, Strategy, everywhere, named, rule

aten = torch.ops.aten
R, P = REPLICATE, PARTIAL


def leading(spatial: int, linear: bool) -> Rule:
    """All but the last ``spatial`` dims of every tensor. These kernels reject empty tensors.

    ``linear``: they add up elements of the first tensor, weighted by numbers that depend on sizes alone, so sums may stay pending.
    """

    def of(call: Call) -> list[Strategy]:
        ndim = call.inputs[0].ndim
        found = [dataclasses.replace(everywhere(shard(d), call), nonempty=True) for d in range(ndim - spatial)]
        if linear:
            found.append(Strategy((P, *[R] * (len(call.inputs) - 1)), (P,)))
        return found

    return of


rule(aten.max_pool2d_with_indices.default, aten.adaptive_max_pool2d.default, aten.max_unpool2d.default)(
    leading(2, False)
)
rule(aten.max_pool3d_with_indices.default, aten.adaptive_max_pool3d.default, aten.max_unpool3d.default)(
    leading(3, False)
)
rule(aten.adaptive_avg_pool1d.default, aten.avg_pool1d.default)(leading(1, True))
rule(
    aten.avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad2d_backward.default,
    aten.replication_pad2d.default,
    aten.replication_pad2d_backward.default,
)(leading(2, True))
rule(
    aten.avg_pool3d.default,
    aten._adaptive_avg_pool3d.default,
    aten.avg_pool3d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    aten.reflection_pad3d.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad3d.default,
    aten.replication_pad3d_backward.default,
)(leading(3, True))
rule(
    aten.reflection_pad1d.default,
    aten.reflection_pad1d_backward.default,
    aten.replication_pad1d.default,
    aten.replication_pad1d_backward.default,
)(leading(1, True))

rule(
    aten.upsample_nearest1d.default,
    aten._upsample_nearest_exact1d.default,
    aten.upsample_linear1d.default,
)(leading(1, True))
rule(
    aten.upsample_nearest2d.default,
    aten._upsample_nearest_exact2d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_bicubic2d.default,
    aten._upsample_bilinear2d_aa.default,
    aten._upsample_bicubic2d_aa.default,
)(leading(2, True))
rule(
    aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact3d.default,
    aten.upsample_trilinear3d.default,
)(leading(3, True))
rule(
    aten.upsample_nearest1d_backward.default,
    aten._upsample_nearest_exact1d_backward.default,
    aten.upsample_linear1d_backward.default,
    local_shapes={"input_size": 0},
)(leading(1, True))
rule(
    aten.upsample_nearest2d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d_backward.default,
    aten._upsample_bilinear2d_aa_backward.default,
    aten._upsample_bicubic2d_aa_backward.default,
    local_shapes={"input_size": 0},
)(leading(2, True))
rule(
    aten.upsample_nearest3d_backward.default,
    aten._upsample_nearest_exact3d_backward.default,
    aten.upsample_trilinear3d_backward.default,
    local_shapes={"input_size": 0},
)(leading(3, True))


@rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(call: Call) -> list[Strategy]:
    """(input [N, C, ...], grid [N, ...])."""
    found = [
        named(call, (shard(0),), input=shard(0), grid=shard(0)),
        named(call, (shard(1),), input=shard(1)),
    ]
    return [dataclasses.replace(s, nonempty=True) for s in found]


@rule(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(call: Call) -> list[Strategy]:
    b, c = shard(0), shard(1)
    found = [
        named(call, (b, b), grad_output=b, input=b, grid=b),
        named(call, (c, P), grad_output=c, input=c),
    ]
    return [dataclasses.replace(s, nonempty=True) for s in found]


@rule(aten.im2col.default, aten.col2im.default)
def im2col(call: Call) -> list[Strategy]:
    """The batch dim, where there is one."""
    batched = call.inputs[0].ndim == (4 if call.op is aten.im2col.default else 3)
    found = [Strategy((P,), (P,))]
    return [*found, dataclasses.replace(everywhere(shard(0), call), nonempty=True)] if batched else found


@rule(aten.channel_shuffle.default)
def channel_shuffle(call: Call) -> list[Strategy]:
    return [
        dataclasses.replace(everywhere(shard(d), call), nonempty=True) for d in range(call.inputs[0].ndim) if d != 1
    ]


@rule(aten.glu.default)
def glu(call: Call) -> list[Strategy]:
    ndim = call.inputs[0].ndim
    return [everywhere(shard(d), call) for d in range(ndim) if d != call.get("dim") % ndim]


@rule(aten.glu_backward.default)
def glu_backward(call: Call) -> list[Strategy]:
    return glu(call)
