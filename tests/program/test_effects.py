"""What an op is said to write and to return views of, beside what torch's kernels do, over torch's own samples."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from dtorch.program.effects import effects
from dtorch.program.ir import Op, Slot


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


class Watch(TorchDispatchMode):
    """Compares each op that runs with what `effects` says of it; ``wrong`` are those that do more."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: set[str] = set()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in([*args, *kwargs.values()])
        before = [tensor.clone() for tensor in given]
        result = func(*args, **kwargs)
        name = f"{func._schema.name.replace('::', '.')}.{func._schema.overload_name or 'default'}"
        self.seen.add(name)
        numbers = iter(range(len(given)))

        def slots(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return Slot(next(numbers))
            return [slots(item) for item in value] if isinstance(value, (list, tuple)) else value

        program_args = [slots(value) for value in args]
        call = Op(name, program_args, {key: slots(value) for key, value in kwargs.items()}, [len(given)])
        writes, viewed = effects(call, {})
        written = {storage(given[slot]) for slot in writes}
        shared = {storage(given[slot]) for slot in (*viewed, *writes)}
        for one, was in zip(given, before, strict=True):
            # (Of memory that is not initialised a bool may be neither.)
            if storage(one) not in written and one.is_floating_point() and not same(one, was):
                self.wrong.add(f"{name} writes")
        for out in tensors_in(result):
            behind = {storage(one) for one in given if one.numel()} - shared
            if out.numel() and storage(out) in behind:
                self.wrong.add(f"{name} returns a view")
        return result


def test_nothing_is_hidden() -> None:
    """In inference mode, too, where torch hands ops over that are made of others: ``dropout`` may return what it is given."""
    watch = Watch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in op_db:
            if torch.float32 not in op.dtypes:
                continue
            # Not `sample_inputs`, which looks at the whole stack each time.
            for sample in itertools.islice(op.sample_inputs_func(op, "cpu", torch.float32, requires_grad=False), 2):
                for inference in (False, True):
                    try:
                        with torch.inference_mode(inference), watch:
                            op(sample.input, *sample.args, **sample.kwargs)
                    except (RuntimeError, TypeError, ValueError, AssertionError):
                        continue  # what cannot run under a mode is not seen
    assert not watch.wrong
    assert len(watch.seen) > 400


@pytest.mark.parametrize(
    ("call", "written", "viewed"),
    [
        (Op("aten.split.Tensor", [Slot(0), 2], {}, [1, 2]), [], [0]),
        (Op("aten.unbind.int", [Slot(0)], {}, [1, 2]), [], [0]),
        (Op("aten._unsafe_view.default", [Slot(0), [4]], {}, [1]), [], [0]),
        (Op("aten.add_.Tensor", [Slot(0), Slot(1)], {}, [2]), [0], [0]),
        (Op("aten.add.out", [Slot(0), Slot(1)], {"out": Slot(2)}, [3]), [2], [2]),
        (Op("aten.mm.default", [Slot(0), Slot(1)], {}, [2]), [], []),
        (Op("aten.dropout.default", [Slot(0), 0.5, False], {}, [1]), [], [0]),
    ],
)
def test_effects(call: Op, written: list[int], viewed: list[int]) -> None:
    assert effects(call, {}) == (written, viewed)


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_in_training_writes_its_statistics(training: bool) -> None:
    slots = [Slot(i) for i in range(5)]
    call = Op("aten.native_batch_norm.default", [*slots, training, 0.1, 1e-5], {}, [5, 6, 7])
    assert effects(call, {})[0] == ([3, 4] if training else [])
