"""`set_implicit_communication`: what nobody asked for can be warned of, or refused."""

from __future__ import annotations

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
    with dtorch.set_implicit_communication("warn"), pytest.warns(UserWarning, match="does not ask for"):
        x.softmax(1)


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
