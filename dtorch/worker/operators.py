"""From an op's name to what a worker calls."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Namespaces of torch's own that no program has a use for (2.13: ``torch._C._dispatch_get_all_op_names()``).
FORBIDDEN_NAMESPACES = frozenset(
    (
        "_c10d_functional",
        "_c10d_functional_autograd",
        "_dtensor",
        "_native",
        "_quantized",
        "_test",
        "c10d",
        "debug_mode_ops",
        "debugprims",
        "export",
        "inductor",
        "inductor_prims",
        "mkl",
        "mkldnn",
        "mkldnn_prepacked",
        "onednn",
        "profiler",
        "quantization",
        "quantized",
        "rngprims",
        "sparse",
        "static_runtime",
        "symm_mem",
    )
)


def resolve(name: str) -> torch._ops.OpOverload:
    """The registered op called ``namespace.name.overload``: aten's, prims', or one that an imported module registered.

    Raises:
        ValueError: there is no such op here, or its namespace is one of torch's own that programs may not name.
    """
    namespace, _, rest = name.partition(".")
    packet_name, _, overload_name = rest.partition(".")
    if namespace in FORBIDDEN_NAMESPACES:
        raise ValueError(f"op {name!r}: programs may not name ops of {namespace!r}")
    packet = getattr(getattr(torch.ops, namespace, None), packet_name, None)
    if isinstance(packet, torch._ops.OpOverloadPacket) and (overload_name or "default") in packet.overloads():
        return getattr(packet, overload_name or "default")
    raise ValueError(f"there is no op {name!r} on this worker; import the module that registers it (worker_imports)")


def _names(text: str) -> list[str]:
    return text.split()


# Calling an overload costs about 1 us more than the builtin that parses to it (`benchmarks`: 2.06 against 1.0 for a tiny
# add). Only those are listed whose builtin takes the same arguments in the same order and can mean no other overload.
_FUNCTIONS = _names(
    """add.Tensor sub.Tensor mul.Tensor div.Tensor mm.default bmm.default addmm.default matmul.default neg.default
    exp.default log.default sqrt.default rsqrt.default sin.default cos.default tanh.default sigmoid.default relu.default
    abs.default erf.default reciprocal.default square.default bitwise_not.default logical_not.default isnan.default
    maximum.default minimum.default where.self embedding.default _softmax.default _log_softmax.default
    eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar
    logical_and.default logical_or.default bitwise_and.Tensor bitwise_or.Tensor pow.Tensor_Scalar pow.Tensor_Tensor
    transpose.int permute.default unsqueeze.default squeeze.dim select.int t.default narrow.default cat.default
    index_select.default masked_fill.Scalar masked_fill.Tensor addcmul.default addcdiv.default lerp.Scalar lerp.Tensor
    clamp.default native_layer_norm.default rsub.Tensor rsub.Scalar"""
)
_METHODS = _names(
    """view.default expand.default copy_.default add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor addcmul_.default
    addcdiv_.default lerp_.Scalar zero_.default sqrt_.default neg_.default"""
)
_NN = _names("silu.default gelu.default linear.default")

BUILTINS: dict[str, Callable] = {
    **{f"aten.{name}": getattr(torch, name.partition(".")[0]) for name in _FUNCTIONS},
    **{f"aten.{name}": getattr(torch.Tensor, name.partition(".")[0]) for name in _METHODS},
    **{f"aten.{name}": getattr(torch._C._nn, name.partition(".")[0]) for name in _NN},
}
