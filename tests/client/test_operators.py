"""Operators of which the plan is known: the same as torch's functions, wherever something of torch's has a part in them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import dtorch
from dtorch import DeviceMesh, Shard
from dtorch.client import dispatch, operators, runtime
from dtorch.tensor import Tensor

from .same import compare, every_engine, every_layout, place, same

pytestmark = every_engine

X = torch.linspace(0.5, 3.0, 12).view(4, 3)
Y = torch.linspace(2.0, -1.0, 12).view(4, 3)

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "**": operator.pow, "@": lambda x, y: x @ y.t(),
    "+=": operator.iadd, "-=": operator.isub, "*=": operator.imul, "/=": operator.itruediv, "-x": lambda x, y: -x,
    "abs": lambda x, y: abs(x), "x + 2": lambda x, y: x + 2, "2 + x": lambda x, y: 2 + x, "x - 0.5": lambda x, y: x - 0.5,
    "2 - x": lambda x, y: 2 - x, "x * 2": lambda x, y: x * 2, "-1.5 * x": lambda x, y: -1.5 * x, "x / 2": lambda x, y: x / 2,
    "2 / x": lambda x, y: 2 / x, "x ** 2": lambda x, y: x**2, "x **= 2": lambda x, y: operator.ipow(x, 2),
    "x @= y": lambda x, y: operator.imatmul(x, y.t()), "x += 2": lambda x, y: operator.iadd(x, 2),
    "x *= 0.5": lambda x, y: operator.imul(x, 0.5), "x + True": lambda x, y: x + True,
    "numpy": lambda x, y: x + np.float32(2) - np.int64(1), "x + 2**40": lambda x, y: x + 2**40, "x + 2**70": lambda x, y: x + 2**70,
    "x + 1e300": lambda x, y: x + 1e300, "x + 1j": lambda x, y: x + 1j, "x + text": lambda x, y: x + "a",
    "x + None": lambda x, y: x + None, "add": lambda x, y: x.add(y), "add of": lambda x, y: x.add(other=y),
    "add alpha": lambda x, y: x.add(y, alpha=2), "sub alpha": lambda x, y: x.sub_(y, alpha=2),
    "div mode": lambda x, y: x.div(y, rounding_mode="floor"), "alpha first": lambda x, y: x.add_(2, y),
    "no argument": lambda x, y: x.add(), "too many": lambda x, y: x.exp(y),
    "out": lambda x, y: torch.add(x, y, out=x), "mm": lambda x, y: x.mm(y.t()), "matmul": lambda x, y: x.matmul(y.t()),
    "vector": lambda x, y: x @ y[0], "batches": lambda x, y: x @ y.t()[None], "pow": lambda x, y: x.pow(y),
    "pow 3": lambda x, y: x.pow(3), "mul_": lambda x, y: x.mul_(y), "div_": lambda x, y: x.div_(2), "exp": lambda x, y: x.exp(),
    "sqrt": lambda x, y: x.sqrt(), "rsqrt": lambda x, y: x.rsqrt(), "sigmoid": lambda x, y: x.sigmoid(), "tanh": lambda x, y: x.tanh(),
    "neg": lambda x, y: x.neg(), "itself": lambda x, y: x.add_(x), "a view": lambda x, y: (x[1:].mul_(2), x)[1],
    "of a view": lambda x, y: (x.mul_(2), x.t()[:2])[1], "0-d": lambda x, y: x * y[0, 0], "broadcast": lambda x, y: x + y[0],
    "shapes that do not fit": lambda x, y: x + y[:3],
}  # fmt: skip


def repeated(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` three times, each time on other memory: the plan is known from the second time on."""

    def program(*given: Any) -> Any:
        return [call(*[one.detach().clone().requires_grad_(one.requires_grad) for one in given]) for _ in range(3)]

    return program


@every_layout
@pytest.mark.parametrize("name", CALLS)
def test_values_and_errors(name: str, layout: str) -> None:
    same(repeated(CALLS[name]), layout, X, Y)
    with torch.inference_mode():
        same(repeated(CALLS[name]), layout, X, Y)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.float64, torch.bfloat16, torch.complex64], ids=str
)
@pytest.mark.parametrize(
    "name",
    ["+", "-", "*", "/", "**", "@", "+=", "/=", "x + 2", "x / 2", "-1.5 * x", "-x", "sqrt", "x *= 0.5", "x + 2**40"],
)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    def tried(x: Any, y: Any) -> Any:
        try:
            return CALLS[name](x, y)
        except (RuntimeError, TypeError) as error:
            return str(type(error))

    same(repeated(tried), "first", X.to(dtype), Y.abs().to(dtype))


@pytest.mark.parametrize("name", ["+", "*", "@", "-x", "exp", "x + 2", "2 + x", "x ** 2"])
def test_gradients(name: str) -> None:
    def program(x: Any, y: Any) -> Any:
        found = []
        for _ in range(3):
            result = CALLS[name](x, y)
            result.square().sum().backward()
            found += [result.requires_grad, x.grad.clone(), None if y.grad is None else y.grad.clone()]
            with torch.no_grad():
                found.append(CALLS[name](x, y).requires_grad)
        return found

    same(program, "first", X.clone().requires_grad_(), Y.clone().requires_grad_())
    same(program, "first", X.clone().requires_grad_(), Y.clone())


def test_in_place_ops_are_counted() -> None:
    def program(x: Any, y: Any, w: Any) -> Any:
        found: list[Any] = []
        start = x._version, w._version
        for _ in range(3):
            product = x * w
            x.add_(y)
            found.append(x._version - start[0])
            try:
                product.sum().backward()
            except RuntimeError as error:
                found.append("modified by an inplace operation" in str(error))
        with torch.no_grad():
            w.mul_(2)
            w += y
        return [*found, w._version - start[1], w.grad]

    same(program, "first", X, Y, X.clone().requires_grad_())


def test_in_place_ops_that_torch_refuses() -> None:
    def program(x: Any, y: Any, w: Any) -> Any:
        start = x._version
        x.add_(y)
        w.detach().add_(y)
        found = []
        for call in (lambda: w.add_(y), lambda: w.view(-1).add_(1.0)):
            with pytest.raises(RuntimeError) as raised:
                call()
            found.append(str(raised.value))
        with torch.inference_mode():
            made = x + y
            made.add_(y)
            x.add_(y)
        with pytest.raises(RuntimeError) as raised:
            made.add_(y)
        return [*found, str(raised.value), made, x, x._version - start]

    same(program, "first", X, Y, X.clone().requires_grad_())


def test_what_kind_of_tensor_a_result_is() -> None:
    x = place(X, "first")
    for context in (nullcontext, torch.no_grad, torch.inference_mode):
        with context():
            for _ in range(3):
                one, other = x + x, torch.add(x, x)
                for look in ("is_inference", "is_contiguous", "stride", "size"):
                    assert getattr(one, look)() == getattr(other, look)()
                assert (one.requires_grad, one.is_leaf, one.placements) == (False, True, other.placements)


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_operators() -> None:
    def program(x: Any, y: Any) -> Any:
        found: list[Any] = []
        for _ in range(3):
            found.append(x.clone().mul_(2) + y @ y.t()[:, :3][:3] * 2 - -y)
            with Functions() as functions:
                x.clone().mul_(2) + y
                2 * x - -y
            with Ops() as ops:
                x.clone().mul_(2) + y
                2 * x - -y
            found += [functions.seen, ops.seen]
        return found

    same(program, "first", X, Y)


@contextmanager
def double_as_default() -> Iterator[None]:
    dtorch.synchronize()  # simulated workers have this process's default
    torch.set_default_dtype(torch.float64)
    try:
        yield
        dtorch.synchronize()
    finally:
        torch.set_default_dtype(torch.float32)
        dtorch.synchronize()


def cpu_autocast() -> AbstractContextManager:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize(
    "context", [cpu_autocast, double_as_default, torch.no_grad, torch.inference_mode, lambda: torch.device("cpu")]
)
def test_contexts(context: Callable[[], AbstractContextManager]) -> None:
    def program(x: Any, y: Any, whole: Any) -> Any:
        found = []
        for _ in range(3):
            for inside in (nullcontext, context):
                with inside():
                    found += [x @ y.t(), x + y, whole / 2, whole * 1.5, whole.exp(), 2 * x]
        return found

    same(program, "first", X, Y, torch.arange(5))


def test_transforms() -> None:
    def program(x: Any, y: Any) -> Any:
        found = []
        for _ in range(3):
            found += [
                x + y,
                x * 2,
                -x,
                torch.func.vmap(lambda a: (a + y[0]) * 2 + -a)(x),
                torch.func.vmap(lambda a: x @ a)(y),
            ]
            found.append(torch.func.grad(lambda a: ((a * y + x) ** 2).sum())(x))
            found += torch.func.jvp(lambda a: a * y + 2 * a, (x,), (y,))
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x, y)
                found += forward_ad.unpack_dual(dual * x + y)
        return found

    same(program, "first", X, Y)


def test_profiler_sees_operators() -> None:
    x = place(X, "first")
    x + x
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        x + x
    assert "aten::add" in {event.key for event in profile.key_averages()}


def test_traces_see_operators() -> None:
    x = place(X, "first")
    _ = x + x, x * 2
    traced = torch.jit.trace(lambda a: (a + a) * 2, (x,), check_trace=False)
    assert [node.kind() for node in traced.graph.nodes() if "aten" in node.kind()] == ["aten::add", "aten::mul"]


def test_plain_tensors_and_other_classes() -> None:
    class Other:
        def __radd__(self, left: Any) -> str:
            return "radd"

        def __rmatmul__(self, left: Any) -> str:
            return "rmatmul"

        def __add__(self, right: Any) -> str:
            return "add"

        def __mul__(self, right: Any) -> Any:
            return NotImplemented

    def program(x: Any, y: Any) -> Any:
        found = []
        for _ in range(3):
            found += [x + Y, Y + x, Y * x, Y - x, Y @ x.t(), Y / x, x * torch.tensor(2.0), torch.tensor(2) * x]
            found += [x + Other(), x @ Other(), Other() + x, operator.iadd(x, Other())]
            found += [np.float64(2) * x, x * np.array([1.0, 2.0, 3.0], dtype=np.float32)[0]]
            with pytest.raises(TypeError):
                Other() * x
            with pytest.raises(TypeError):
                x + Other  # type: ignore[operator]
        return found

    same(program, "first", X, Y)


@pytest.mark.parametrize(
    "name", ["__add__", "__matmul__", "__itruediv__", "__neg__", "add", "mm", "pow", "mul_", "exp", "abs"]
)
def test_methods_of_the_class(name: str) -> None:
    """As in ``map(dtorch.Tensor.exp, ...)``: of a plain tensor they are torch's, and of what is no tensor an error."""
    ours, torchs = getattr(Tensor, name), getattr(torch.Tensor, name)
    others = () if name in ("__neg__", "exp", "abs") else (Y.t() if name in ("__matmul__", "mm") else Y,)
    x, placed = place(X, "first"), [place(other, "first") for other in others]
    for _ in range(3):
        compare(ours(x.clone(), *placed).to_torch(), torchs(X.clone(), *others))
        compare(ours(X.clone(), *others), torchs(X.clone(), *others))
        if others and name not in ("__itruediv__", "mul_"):
            compare(ours(X, *placed).to_torch(), torchs(X, *others))
        with pytest.raises(TypeError):
            ours(3, *others)


def test_conjugates_and_names() -> None:
    z = torch.complex(X, Y)

    def program(x: Any, y: Any) -> Any:
        return [(x.conj() * y, x + y.conj(), -x.conj(), x.conj().imag + y.imag, x.conj() @ y.t()) for _ in range(3)]

    same(program, "first", z, z * 2)


def test_uncommitted() -> None:
    def program(x: Any, y: Any) -> Any:
        found = []
        for _ in range(3):
            fresh = torch.ones(4, 3, device=x.device)
            fresh += 1
            found += [
                fresh * 2,
                fresh + fresh,
                -fresh,
                fresh + x,
                x * fresh,
                operator.iadd(torch.zeros(4, 3, device=x.device), x),
            ]
        return found

    same(program, "first", X, Y)


@pytest.mark.parametrize(
    "call",
    [lambda x, y: x + y, lambda x, y: x.add(y), lambda x, y: x.add_(y), lambda x, y: 2 * x],
    ids=["+", "add", "add_", "2 *"],
)
def test_an_op_is_known_by_the_users_line(call: Callable[[Any, Any], Any]) -> None:
    x, y = place(X, "first"), place(Y, "first")
    results = [call(x, y) for _ in range(3)]
    controller = runtime.controller()
    results.append(call(x, y))  # kept: what dies is another command, at any time
    line = controller.history.line(controller.sequence - 1)
    assert line.startswith(__file__)
    assert "lambda x, y" in line  # where the operator is, not where its function was called
    with dtorch.record() as recorded:
        call(x, y)
    assert [op.line for op in recorded.ops] == [line]


def test_the_line_of_what_fails() -> None:
    x = place(X.to(torch.int64), "first")
    _ = x**2
    bad = x**-2
    with pytest.raises(dtorch.errors.RemoteError, match=r"bad = x\*\*-2"):
        (bad + x).to_torch()


def test_communication_that_nobody_asked_for() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    x = dtorch.distribute_tensor(X, mesh, [Shard(0)])
    y = dtorch.distribute_tensor(Y, mesh, [Shard(1)])
    for _ in range(3):
        compare((x + y).to_torch(), X + Y)
        with dtorch.set_implicit_communication("error"), pytest.raises(dtorch.errors.ImplicitCommunication):
            x + y


def test_known_operators_do_not_go_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = place(X, "first"), place(Y, "first")
    calls = [
        call
        for name, call in CALLS.items()
        if name in ("+", "*", "x + 2", "-1.5 * x", "-x", "exp", "+=", "x *= 0.5", "pow 3")
    ]
    for call in calls:
        call(x, y)
    monkeypatch.setattr(Tensor, "__torch_dispatch__", classmethod(lambda *args: pytest.fail("went through torch")))
    for context in (nullcontext, torch.no_grad):
        with context():
            for call in calls:
                call(x, y)


def test_every_name_is_an_operator_of_torchs() -> None:
    names = [
        name for table in (operators.BINARY, operators.IN_PLACE, operators.UNARY) for names in table for name in names
    ]
    for name in [*names, *operators.REFLECTED]:
        assert getattr(Tensor, name).__doc__ == getattr(torch.Tensor, name).__doc__
        assert getattr(Tensor, name).__name__ == name
    ops = [*operators.IN_PLACE.values(), *operators.UNARY.values(), *operators.REFLECTED.values()]
    ops += [op for pair in operators.BINARY.values() for op in pair if op is not None]
    assert all(dispatch.info_of(op).handler is None for op in ops)


def test_two_clusters(engine: str) -> None:
    x = place(X, "first")
    x + x
    dtorch.shutdown()
    with pytest.raises(dtorch.errors.DTorchError):
        x + x
    dtorch.init(engine=engine)
    again = place(X, "first")
    again + again
    with pytest.raises(dtorch.errors.DTorchError):
        x + again
    compare((again + again).to_torch(), X + X)
