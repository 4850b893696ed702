"""`set_implicit_communication`: what nobody asked for can be warned of, or refused."""

from __future__ import annotations

import linecache
import warnings

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard
from dtorch.errors import ImplicitCommunication

pytestmark = pytest.mark.usefixtures("engine")

MESH = DeviceMesh("cpu", [0, 1])


def placed(placement: dtorch.Placement) -> dtorch.Tensor:
    return dtorch.ones(4, 6, device_mesh=MESH, placements=[placement])


def test_error_names_op_placements_and_line() -> None:
    x = placed(Shard(1))
    with (
        dtorch.set_implicit_communication("error"),
        pytest.raises(ImplicitCommunication) as caught,
    ):
        x.softmax(1)
    text = str(caught.value)
    assert "aten._softmax.default" in text
    assert f"{__file__}:" in text
    assert "x.softmax(1)" in text
    assert "input 0: shape (4, 6), [Shard(dim=1)]" in text
    assert "would move (4, 6) from [Shard(dim=1)] to [Replicate()]" in text
    assert "accepted on each mesh axis: Shard(dim=0); or all Replicate()" in text
    assert torch.equal(x.softmax(1).to_torch(), torch.ones(4, 6).softmax(1))


def test_warn() -> None:
    x = placed(Shard(1))
    with dtorch.set_implicit_communication("warn"), pytest.warns(UserWarning, match="does not ask for") as told:
        torch.nn.Softmax(1)(x)
    assert [(one.filename, linecache.getline(one.filename, one.lineno).strip()) for one in told] == [
        (__file__, "torch.nn.Softmax(1)(x)")
    ]


def test_what_is_not_implicit() -> None:
    x, whole = placed(Shard(0)).requires_grad_(), placed(Replicate())
    with dtorch.set_implicit_communication("error"), warnings.catch_warnings():
        warnings.simplefilter("error")
        (x + 1).sum().backward()
        (x + whole).redistribute(placements=[Replicate()])
        assert placed(Partial()).to_torch().shape == (4, 6)
        print(x)


@pytest.mark.parametrize("name", ["nonzero", "bernoulli", "cumprod"])
def test_ops_that_run_in_ways_of_their_own_are_refused_too(name: str) -> None:
    x = placed(Shard(0))
    with dtorch.set_implicit_communication("error"), pytest.raises(ImplicitCommunication, match=name):
        x.cumprod(0) if name == "cumprod" else getattr(x, name)()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.amax(0),
        lambda x: torch.linalg.vector_norm(x),
        lambda x: torch._foreach_norm([x]),
        lambda x: (x > 0).all(),
    ],
)
def test_a_reduction_that_the_op_completes_is_told(call: object) -> None:
    """The norm of gradients that are split, for one."""
    x = placed(Shard(0))
    with dtorch.set_implicit_communication("error"), pytest.raises(ImplicitCommunication, match=r"from \[Partial"):
        call(x)
    x.grad = placed(Shard(0))
    with dtorch.set_implicit_communication("error"), pytest.raises(ImplicitCommunication):
        torch.nn.utils.clip_grad_norm_([x], 1.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.cumsum(0),
        lambda x: x.cumsum_(0),
        lambda x: x.add_(placed(Shard(1))),
        lambda x: x.bernoulli(),
        lambda x: x.nonzero(),
        lambda x: x.amax(0),
        lambda x: torch.cumsum(x, 0, out=placed(Shard(0))),
        lambda x: dtorch.compile(lambda x: x.cumsum(0))(x),
        lambda x: torch.nn.functional.rrelu(x, training=True),
        lambda x: torch.nn.functional.rrelu_(x, training=True),
        lambda x: x.bernoulli_(x),
        lambda x: torch.mul(x, 1, out=dtorch.empty(0, 6, device_mesh=MESH, placements=[Replicate()])),
        lambda x: x.addbmm_(placed(Shard(0)).view(4, 6, 1)[:, :4], placed(Shard(0)).view(4, 1, 6)),
    ],
)
@pytest.mark.parametrize("copies", [False, True])
def test_what_is_refused_has_not_begun(call: object, copies: bool) -> None:
    """Whether or not a copy is there already, of which the call could be made."""
    x = placed(Shard(0))
    if copies:
        x.cumsum(0)
    random = torch.get_rng_state()
    with dtorch.record() as r, dtorch.set_implicit_communication("error"), pytest.raises(ImplicitCommunication):
        call(x)
    assert (r.communication, r.fallbacks) == ([], [])
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x.to_torch(), torch.ones(4, 6))


def test_a_compiled_function_is_refused_what_it_was_allowed_before() -> None:
    x = placed(Shard(0))
    step = dtorch.compile(lambda x: x.cumsum(0) + 1)
    for _ in range(2):
        assert torch.equal(step(x).to_torch(), torch.ones(4, 6).cumsum(0) + 1)
        for _ in range(2):
            with dtorch.set_implicit_communication("error"), pytest.raises(ImplicitCommunication, match="cumsum"):
                step(x)


@pytest.mark.parametrize(
    "use", [lambda view, base: view + 1, lambda view, base: view.bernoulli(), lambda view, base: view.nonzero()]
)
def test_a_view_that_has_to_be_taken_anew_is_told(use: object) -> None:
    """And reading it is not: the program asks for values."""
    base, plain = placed(Shard(0)), torch.ones(4, 6)
    view = base[1]
    base.mul_(2)
    with dtorch.record() as r, dtorch.set_implicit_communication("error"):
        with pytest.raises(ImplicitCommunication, match=r"aten.select.int needs communication"):
            use(view, base)
        assert (r.ops, r.communication) == ([], [])
        assert torch.equal(view.to_torch(), plain[1] * 2)
        assert torch.equal((view + 1).to_torch(), plain[1] * 2 + 1)


@pytest.mark.parametrize(
    "write", [lambda x: x.add_(1), lambda x: x.copy_(torch.zeros(3)), lambda x: torch.add(x, 1, out=x)]
)
def test_a_write_that_has_to_be_brought_to_its_base_is_told(write: object) -> None:
    base = dtorch.distribute_tensor(torch.arange(9.0).view(3, 3), MESH, [Shard(0)])
    diagonal, row = base.diagonal(), base[1]
    with dtorch.record() as r, dtorch.set_implicit_communication("error"):
        with pytest.raises(ImplicitCommunication, match=r"aten.diagonal.default needs communication"):
            write(diagonal)
        row.add_(1)
        assert r.communication == []
    assert base.tolist() == [[0, 1, 2], [4, 5, 6], [6, 7, 8]]


@pytest.mark.parametrize("mode", ["allow", "error"])
def test_the_backward_of_a_compiled_function_is_refused_as_that_of_a_function(mode: str) -> None:
    """Whichever mode the function was called in: its forward moves nothing."""
    weight = dtorch.ones(6, 8, device_mesh=MESH, placements=[Shard(1)])

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (6,)) @ weight

    values = torch.arange(24.0).view(4, 6).sin()
    expected = values.clone().requires_grad_()
    function(expected, torch.ones(6, 8)).square().sum().backward()
    compiled = dtorch.compile(function)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "dtorch.compile: .* is run op by op: its backward communicates")
        for _ in range(3):
            leaf = dtorch.distribute_tensor(values, MESH, [Replicate()]).requires_grad_()
            with dtorch.record() as r, dtorch.set_implicit_communication(mode):
                made = compiled(leaf, weight).square().sum()
                if mode == "error":
                    assert r.communication == []
            told = pytest.raises(ImplicitCommunication, match="native_layer_norm_backward")
            with dtorch.record() as r, dtorch.set_implicit_communication("error"), told:
                made.backward(retain_graph=True)
            assert r.communication == []
            assert leaf.grad is None
            told = pytest.warns(UserWarning, match="native_layer_norm_backward")
            with dtorch.set_implicit_communication("warn"), told:
                made.backward()
            torch.testing.assert_close(leaf.grad.to_torch(), expected.grad)


def test_it_stays_set_and_is_restored() -> None:
    x = placed(Shard(1))
    dtorch.set_implicit_communication("error")
    try:
        with dtorch.set_implicit_communication("allow"):
            x.softmax(1)
        with pytest.raises(ImplicitCommunication):
            x.softmax(1)
    finally:
        dtorch.set_implicit_communication("allow")


@pytest.mark.parametrize("mode", ["never", None, True])
def test_other_modes(mode: object) -> None:
    with pytest.raises(ValueError, match="mode must be one of 'allow', 'warn', 'error'"):
        dtorch.set_implicit_communication(mode)  # type: ignore[arg-type]
