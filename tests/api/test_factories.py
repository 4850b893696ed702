"""Every factory gives torch's values, dtype and strides, where it was told to put them."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard

pytestmark = pytest.mark.usefixtures("engine")

#: Name → arguments of a call that makes a tensor of at least one dim.
EXACT: dict[str, tuple[Any, ...]] = {
    "zeros": (5, 3),
    "ones": ((5, 3),),
    "full": ((5, 3), 2.5),
    "arange": (1, 6),
    "linspace": (0, 1, 5),
    "logspace": (0, 1, 5),
    "eye": (5, 3),
    "tril_indices": (4, 4),
    "triu_indices": (4, 4),
    "hann_window": (5,),
    "hamming_window": (5,),
    "blackman_window": (5,),
    "bartlett_window": (5,),
    "kaiser_window": (5,),
}
RANDOM: dict[str, tuple[Any, ...]] = {"rand": (5, 3), "randn": (5, 3), "randint": (0, 9, (5, 3)), "randperm": (5,)}
UNSET: dict[str, tuple[Any, ...]] = {
    "empty": (5, 3),
    "empty_strided": ((5, 3), (1, 5)),
    "empty_permuted": ((5, 3), (1, 0)),
}
LIKE: dict[str, tuple[Any, ...]] = {
    "zeros_like": (), "ones_like": (), "empty_like": (), "full_like": (2.5,), "rand_like": (), "randn_like": (), "randint_like": (0, 9),
}  # fmt: skip
NEW: dict[str, tuple[Any, ...]] = {
    "new_zeros": ((5, 3),), "new_ones": (5, 3), "new_full": ((5, 3), 2.5), "new_tensor": ([[1, 2], [3, 4]],),
    "new_empty": ((5, 3),), "new_empty_strided": ((5, 3), (1, 5)),
}  # fmt: skip


@pytest.fixture
def mesh() -> dtorch.DeviceMesh:
    return dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))


def plain(name: str, arguments: tuple[Any, ...]) -> torch.Tensor:
    return getattr(torch, name)(*arguments)


@pytest.mark.parametrize("placement", [None, Replicate(), Shard(0), Shard(-1), Partial()], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_values_are_torchs(name: str, placement: Any, mesh: dtorch.DeviceMesh) -> None:
    expected = plain(name, EXACT[name])
    made = getattr(dtorch, name)(*EXACT[name], device_mesh=mesh, placements=None if placement is None else [placement])
    assert type(made) is dtorch.Tensor
    assert made.device_mesh == mesh
    dim = expected.ndim - 1
    assert made.placements == [{None: Replicate(), Shard(-1): Shard(dim)}.get(placement, placement)]
    assert made.dtype == expected.dtype
    assert made.stride() == expected.stride()
    assert torch.equal(made.to_torch(), expected)


@pytest.mark.parametrize("name", EXACT)
def test_uncommitted_without_mesh_and_placements(name: str) -> None:
    made = getattr(dtorch, name)(*EXACT[name])
    assert isinstance(made, dtorch.Tensor)
    assert made.device_mesh == dtorch.DeviceMesh("cpu")
    assert torch.equal(made.to_torch(), plain(name, EXACT[name]))


@pytest.mark.parametrize("name", {**EXACT, **RANDOM, **UNSET})
def test_shape_dtype_and_keywords(name: str, mesh: dtorch.DeviceMesh) -> None:
    arguments = {**EXACT, **RANDOM, **UNSET}[name]
    dtype = torch.int32 if "indices" in name else torch.float64
    expected = getattr(torch, name)(*arguments, dtype=dtype)
    made = getattr(dtorch, name)(
        *arguments, dtype=dtype, device_mesh=mesh, placements=[Shard(0)], requires_grad=dtype.is_floating_point
    )
    assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
    assert made.requires_grad == dtype.is_floating_point
    assert made.is_leaf
    shards = made.local_shards()
    assert torch.equal(torch.cat([shards[torch.device("cpu", i)] for i in (0, 1)]), made.detach().to_torch())


@pytest.mark.parametrize("name", RANDOM)
def test_random_values_depend_on_the_seed_alone(name: str, mesh: dtorch.DeviceMesh) -> None:
    def make(**where: Any) -> torch.Tensor:
        dtorch.manual_seed(3)
        return getattr(dtorch, name)(*RANDOM[name], device_mesh=mesh, **where).to_torch()

    values = make()
    assert torch.equal(values, make(placements=[Shard(0)]))
    assert torch.equal(values, make(placements=[Partial()]))
    torch.manual_seed(3)
    assert torch.equal(values, getattr(dtorch, name)(*RANDOM[name], device_mesh=mesh).to_torch())


@pytest.mark.parametrize("name", RANDOM)
def test_an_explicit_generator_gives_torchs_values(name: str, mesh: dtorch.DeviceMesh) -> None:
    expected = getattr(torch, name)(*RANDOM[name], generator=torch.Generator().manual_seed(5))
    made = getattr(dtorch, name)(
        *RANDOM[name], generator=torch.Generator().manual_seed(5), device_mesh=mesh, placements=[Shard(0)]
    )
    assert torch.equal(made.to_torch(), expected)


@pytest.mark.parametrize("name", LIKE)
def test_like_follows_its_source_unless_told(name: str, mesh: dtorch.DeviceMesh) -> None:
    values = torch.arange(6.0, dtype=torch.float64).reshape(3, 2).t()
    source = dtorch.distribute_tensor(values, mesh, [Shard(0)])
    expected = plain(name, (values, *LIKE[name]))
    for make in (getattr(dtorch, name), getattr(torch, name)):
        made = make(source, *LIKE[name])
        assert made.placements == [Shard(0)]
        assert made.dtype == expected.dtype
        if "rand" not in name:  # random values are made in row-major order
            assert made.stride() == expected.stride()
    told = getattr(dtorch, name)(source, *LIKE[name], placements=[Replicate()])
    of_plain = getattr(dtorch, name)(values, *LIKE[name], device_mesh=mesh, placements=[Shard(1)])
    assert (told.placements, of_plain.placements) == ([Replicate()], [Shard(1)])
    assert getattr(dtorch, name)(source, *LIKE[name], requires_grad=True).requires_grad
    if name not in ("empty_like",) and "rand" not in name:
        for made in (told, of_plain):
            assert torch.equal(made.to_torch(), expected)


@pytest.mark.parametrize("name", NEW)
def test_new_follows_its_tensor_unless_told(name: str, mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.ones(4, 2, dtype=torch.float64, device_mesh=mesh, placements=[Shard(0)])
    expected = getattr(torch.ones(4, 2, dtype=torch.float64), name)(*NEW[name])
    followed = getattr(x, name)(*NEW[name])
    told = getattr(x, name)(*NEW[name], placements=[Shard(1)])
    elsewhere = getattr(x, name)(*NEW[name], device_mesh=dtorch.DeviceMesh("cpu", [1]), dtype=torch.int32)
    assert followed.device_mesh == told.device_mesh == mesh
    assert told.placements == [Shard(1)]
    assert elsewhere.device_mesh == dtorch.DeviceMesh("cpu", [1])
    assert elsewhere.dtype == torch.int32
    assert (told.shape, told.dtype, told.stride()) == (expected.shape, expected.dtype, expected.stride())
    if "empty" not in name:
        assert torch.equal(followed.to_torch(), expected)
        assert torch.equal(told.to_torch(), expected)
    uncommitted = getattr(dtorch.ones(2, dtype=torch.float64), name)(*NEW[name])
    assert (uncommitted + x.sum()).device_mesh == mesh


def test_tensor_from_data(mesh: dtorch.DeviceMesh) -> None:
    where: dict[str, Any] = {"device_mesh": mesh, "placements": [Shard(0)]}
    data = [[1, 2], [3, 4], [5, 6]]
    assert torch.equal(dtorch.tensor(data, **where).to_torch(), torch.tensor(data))
    assert torch.equal(dtorch.Tensor(data, **where).to_torch(), torch.Tensor(data))
    assert torch.equal(
        dtorch.as_tensor(data, torch.float64, **where).to_torch(), torch.as_tensor(data, dtype=torch.float64)
    )
    array = numpy.arange(6, dtype=numpy.int16).reshape(3, 2)
    made = dtorch.from_numpy(array, **where)
    array[:] = 0
    assert torch.equal(made.to_torch(), torch.arange(6, dtype=torch.int16).reshape(3, 2))
    scalars = dtorch.tensor([dtorch.ones((), device_mesh=mesh), 2.0])
    assert torch.equal(scalars.to_torch(), torch.tensor([1.0, 2.0]))
    assert dtorch.Tensor(2, 3).shape == dtorch.Tensor(torch.Size([2, 3])).shape == (2, 3)
    assert dtorch.Tensor().shape == (0,)


def test_from_torch_copies_and_keeps_requires_grad(mesh: dtorch.DeviceMesh) -> None:
    source = torch.arange(6.0).reshape(3, 2).requires_grad_()
    for made in (dtorch.from_torch(source, mesh, [Shard(0)]), dtorch.from_torch(source)):
        assert made.requires_grad
        assert made.is_leaf
        with torch.no_grad():
            source += 1
        assert torch.equal(made.detach().to_torch() + 1, source.detach())
        with torch.no_grad():
            source -= 1
    assert dtorch.from_torch(made) is made
    placed = dtorch.distribute_tensor(source, mesh)
    assert placed.placements == [Replicate()]
    assert dtorch.distribute_tensor(placed, mesh, [Shard(1)]).placements == [Shard(1)]


def test_default_mesh_holds_for_torchs_factories_too(mesh: dtorch.DeviceMesh) -> None:
    with dtorch.default_mesh(mesh) as given:
        assert given is mesh
        made = [
            torch.zeros(2),
            dtorch.zeros(2),
            torch.tensor([1.0, 2.0]),
            torch.arange(2),
            torch.nn.Linear(2, 2).weight,
        ]
        assert torch.zeros(2, device="cpu").__class__ is torch.Tensor
    for tensor in made:
        assert isinstance(tensor, dtorch.Tensor)
        assert tensor.device_mesh == mesh
    assert type(torch.zeros(2)) is torch.Tensor
    assert dtorch.zeros(2).device_mesh == dtorch.DeviceMesh("cpu")


@pytest.mark.parametrize("name", ["rand", "randn"])
def test_a_dtype_without_such_random_numbers(name: str, mesh: dtorch.DeviceMesh) -> None:
    with pytest.raises(NotImplementedError) as expected:
        getattr(torch, name)(2, dtype=torch.int64)
    with pytest.raises(NotImplementedError) as raised:
        getattr(dtorch, name)(2, dtype=torch.int64, device_mesh=mesh)
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((9, (5, 3)), {}),
        ((9,), {"size": (5, 3)}),
        ((numpy.int64(9), (5, 3)), {}),
        ((), {"low": 2, "high": 9, "size": [5, 3]}),
        ((2,), {"high": 9, "size": torch.Size([5, 3]), "dtype": torch.uint8}),
    ],
)
def test_every_form_of_randint(arguments: Any, named: Any, mesh: dtorch.DeviceMesh) -> None:
    expected = torch.randint(*arguments, **named)
    made = dtorch.randint(*arguments, **named, device_mesh=mesh).to_torch()
    assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
    assert 0 <= int(made.min()) <= int(made.max()) < 9


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("randint", (0, 9, 2)), ("randint", ()), ("randint", (9, 0, (2,))), ("randn", (-1,)), ("randn", ("a",))],
)
def test_a_wrong_call_of_a_random_factory_is_told_in_its_own_name(
    name: str, arguments: Any, mesh: dtorch.DeviceMesh
) -> None:
    with pytest.raises((TypeError, RuntimeError)) as expected:
        getattr(torch, name)(*arguments)
    state = torch.get_rng_state()
    with pytest.raises(type(expected.value), match=re.escape(str(expected.value).split("(")[0])):
        getattr(dtorch, name)(*arguments, device_mesh=mesh)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "number", [numpy.int64(3), numpy.float32(1.5), numpy.bool_(True)], ids=lambda n: type(n).__name__
)
def test_numpy_scalars_are_numbers(number: Any, mesh: dtorch.DeviceMesh) -> None:
    expected = torch.full((2,), number)
    made = dtorch.full((2,), number, device_mesh=mesh)
    assert made.dtype == expected.dtype
    assert torch.equal(made.to_torch(), expected)
    assert torch.equal((made * number).to_torch(), expected * number)


@pytest.mark.parametrize("name", ["from_torch", "distribute_tensor"])
def test_what_a_plain_graph_made_is_placed_with_its_graph(name: str) -> None:
    """A leaf is copied as a leaf."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    encoder, x, weight = torch.nn.Linear(3, 4), torch.randn(5, 3), torch.randn(4, 2)
    expected = torch.autograd.grad((encoder(x) @ weight).sin().sum(), list(encoder.parameters()))
    for where in ([Shard(0)], [Shard(1)], [Replicate()], [Partial()]):
        hidden = getattr(dtorch, name)(encoder(x), mesh, where)
        assert hidden.requires_grad
        assert not hidden.is_leaf
        found = torch.autograd.grad((hidden @ dtorch.from_torch(weight, mesh)).sin().sum(), list(encoder.parameters()))
        torch.testing.assert_close(found, expected)
    leaf = getattr(dtorch, name)(encoder.weight, mesh, [Shard(0)])
    assert leaf.is_leaf
    assert leaf.requires_grad
