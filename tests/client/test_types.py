"""Numbers, 0-d tensors, numpy scalars and arrays, type promotion, default dtypes: torch's rules."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch

import dtorch

from .same import compare, each, every_engine, every_layout, place, same

pytestmark = every_engine

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
NUMBERS = [True, 2, -3, 2.5, 1j, np.float32(2), np.float64(2.5), np.int64(3), np.bool_(True)]
OPERATORS = [operator.add, operator.mul, operator.sub, operator.truediv, operator.lt, operator.eq, operator.pow]


def tried(call: Any) -> Any:
    """The result, or the kind of error; one that only the values show (an int to a negative power) comes when they are read."""
    try:
        result = call()
        return result.detach().to_torch() if isinstance(result, dtorch.Tensor) else result
    except dtorch.errors.RemoteError:
        return RuntimeError
    except (RuntimeError, TypeError, NotImplementedError, OverflowError) as error:
        return type(error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_and_numbers(dtype: torch.dtype) -> None:
    plain = torch.tensor([[0, 1, 2], [3, 1, 0]]).to(dtype)
    ours = place(plain, "first")
    for number in NUMBERS:
        for op in OPERATORS:
            for left, right in ((ours, plain), (ours[0, 1], plain[0, 1])):
                compare(
                    tried(lambda a=left, n=number, op=op: op(a, n)), tried(lambda a=right, n=number, op=op: op(a, n))
                )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_two_dtypes(dtype: torch.dtype) -> None:
    plain = torch.tensor([[0, 1, 2], [3, 1, 0]]).to(dtype)
    ours = place(plain, "last")
    for other in DTYPES:
        second = torch.tensor([1, 2, 1]).to(other)
        for q, p in (
            (place(second, "replicated"), second),
            (second, second),
            (place(second[0], "replicated"), second[0]),
            (second[0], second[0]),
        ):
            compare(tried(lambda q=q: ours * q), tried(lambda p=p: plain * p))
            compare(tried(lambda q=q: torch.add(q, ours)), tried(lambda p=p: torch.add(p, plain)))
            assert torch.result_type(ours, q) == torch.result_type(plain, p)
        compare(ours.to(other), plain.to(other))
        compare(tried(lambda other=other: ours.sum(dtype=other)), tried(lambda other=other: plain.sum(dtype=other)))


def big_numbers(x: Any) -> Any:
    return (
        x.long() + 2**62,
        x.long() * -(2**63),
        x.double() + 2**63,
        x > 2**40,
        torch.full_like(x, 2**53 + 1, dtype=torch.float64),
    )


def too_big_numbers(x: Any) -> Any:
    return x.long() + 2**64


def numbers_that_are_equal_are_not_the_same(x: Any) -> Any:
    y = x.bool()
    return (
        [(y + n).dtype for n in (True, 1, 1.0, 1 + 0j)],
        [(x.long() * n).dtype for n in (1, True, 1.0)],
        x.sum(0).shape,
        x.sum(False).shape,
    )


def special_numbers(x: Any) -> Any:
    return (
        x + float("nan"),
        x * float("inf"),
        x * -0.0,
        1 / (x * -0.0),
        x + 1e-300,
        x.clamp(-float("inf"), 0.5),
        x + complex(0.0, -0.0),
    )


def division_kinds(x: Any) -> Any:
    n = x.long()
    return (
        n / 2,
        n // 2,
        n % 3,
        -n // 2,
        x // 0.7,
        torch.div(n, 3, rounding_mode="trunc"),
        divmod(n, 4),
        n.float() % -2,
        7 // (n + 20),
    )


def numpy_values(x: Any) -> Any:
    array = np.arange(6, dtype=np.float32)
    return (
        x * np.float32(3),
        x + np.int16(2),
        np.float64(2) * x,
        x[:, np.int64(2)],
        x[np.array([0, 1])],
        x.new_tensor(array),
        torch.as_tensor(array) + x,
    )


def scalars_stay_scalars(x: Any) -> Any:
    zero = x[0, 0]
    return (
        (zero.long() * 1.5).dtype,
        (x.half() * torch.tensor(2.0)).dtype,
        (x.half() + zero).dtype,
        (x.long() + torch.tensor(1.5)).dtype,
    )


def in_place_casts(x: Any) -> Any:
    n = x.long()
    n += 2
    n.mul_(True)
    return n, (x.half().add_(x)).dtype


def in_place_refused(x: Any) -> Any:
    n = x.long()
    n += 1.5


def default_dtype(x: Any) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return (
            x.long() / 2,
            x.long() + 1.5,
            x.new_tensor([1.0]).dtype,
            torch.tensor([1.0], device=x.device) + x,
            x.long().mean(dtype=None, dim=0).dtype,
        )
    except RuntimeError as error:
        return str(error)
    finally:
        torch.set_default_dtype(before)


def casts(x: Any) -> Any:
    return (
        x.half(),
        x.bfloat16().float(),
        x.int(),
        x.bool(),
        x.double(),
        x.to(torch.complex64),
        x.type(torch.int8),
        x.type_as(x.long()),
        x.to(x.double()),
    )


def same_cast_is_itself(x: Any) -> Any:
    return (
        x.float() is x,
        x.to(torch.float32) is x,
        x.to(torch.float32, copy=True) is x,
        x.contiguous() is x,
        x.to("cpu") is x,
    )


def complex_parts(x: Any) -> Any:
    z = torch.complex(x, x * 2)
    return z.real, z.imag, z.abs(), z.conj() * z, z.angle(), torch.view_as_real(z), z.real.is_complex(), z.conj().imag


def bit_casts(x: Any) -> Any:
    return x.view(torch.int32), x.view(torch.int16), x.double().view(torch.float32), x.long().view(torch.uint8)


def float8(x: Any) -> Any:
    return x.to(torch.float8_e4m3fn).float(), x.bfloat16().to(torch.float8_e5m2).to(torch.float64)


def infos(x: Any) -> Any:
    return (
        torch.finfo(x.dtype).max,
        torch.iinfo(x.long().dtype).bits,
        torch.can_cast(x.dtype, torch.int),
        torch.promote_types(x.dtype, torch.half),
    )


@each(
    *[
        p
        for p in list(globals().values())
        if getattr(p, "__module__", None) == __name__ and callable(p) and p.__code__.co_varnames[:1] == ("x",)
    ]
)
@every_layout
def test_a_program(program: Any, layout: str) -> None:
    same(program, layout, torch.linspace(-3, 3, 24).reshape(4, 6))
