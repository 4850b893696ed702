"""Every strategy of every rule gives what plain torch gives, for parts that are uneven and empty too."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch

from dtorch.sharding import packing
from dtorch.sharding.rules import STATIC_NUMBERS, rule_for
from dtorch.sharding.strategy import RULES, Strategy

from .cases import all_cases
from .ground_truth import Sample, call_of, check, check_shuffled, run_whole, strategies_of
from .samples import from_opinfo
from .special import matters, numbered, salted

aten = torch.ops.aten


@functools.cache
def captured() -> tuple[Sample, ...]:
    return tuple(sample for samples in from_opinfo(limit=3, per_op=3).samples.values() for sample in samples)


@functools.cache
def written() -> tuple[Sample, ...]:
    return tuple(all_cases())


def wrong_of(
    samples: Iterable[Sample], sizes: Sequence[int], pairs: int, which: Callable[[Strategy], bool] = lambda s: True
) -> tuple[list[str], Counter]:
    """What is wrong, in words, and how many checks ran, an op."""
    choice = random.Random(0)
    wrong, ran = [], Counter[str]()
    for sample in samples:
        whole = run_whole(sample)
        strategies = [s for s in strategies_of(call_of(sample, whole[0])) if which(s)]
        jobs = [((size,), (s,)) for s in strategies for size in sizes]
        both = list(itertools.product(strategies, strategies))
        jobs += [((2, 3), pair) for pair in choice.sample(both, min(pairs, len(both)))]
        for mesh_shape, chosen in jobs:
            try:
                ran[str(sample.op)] += check(sample, mesh_shape, chosen, whole)
            except Exception as error:
                wrong.append(f"{sample} on {mesh_shape}: {chosen}\n    {str(error)[:300]}")
    return wrong, ran


@pytest.mark.parametrize(("source", "sizes"), [(written, (2, 3, 4)), (captured, (4,))])
def test_every_strategy_is_right(source, sizes) -> None:
    wrong, ran = wrong_of(source(), sizes, pairs=1)
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:10])
    assert sum(ran.values()) > 2000


def test_rules_that_know_packed_dims_are_right_for_any_indices() -> None:
    wrong, ran = [], set()
    for sample in (*written(), *captured()):
        entry = rule_for(sample.op)
        if entry is None or not packing.knows(entry):
            continue
        whole = run_whole(sample)
        call = call_of(sample, whole[0])
        for strategy in strategies_of(call):
            if packing.size_of(call.inputs, call.outputs, strategy) is not None:
                ran.add(sample.op)
                try:
                    check_shuffled(sample, strategy, whole)
                except Exception as error:
                    wrong.append(f"{sample}: {strategy}\n    {str(error)[:300]}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:10])
    assert len(ran) > 300


def takes(sample: Sample) -> bool:
    """Whether plain torch accepts the values."""
    try:
        run_whole(sample)
    except RuntimeError:
        return False
    return True


@pytest.mark.filterwarnings("ignore:TF32")
def test_infinite_and_huge_values() -> None:
    """A convolution of oneDNN may take differences of elements first, so an infinite one spreads as its algorithm has it."""
    samples = [*numbered(), *(one for sample in (*written(), *captured()) for one in salted(sample))]
    with torch.backends.mkldnn.flags(enabled=False):
        wrong, ran = wrong_of([s for s in samples if takes(s)], (2, 3), 0, matters)
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:10])
    assert sum(ran.values()) > 2000


def test_every_rule_has_a_sample() -> None:
    sampled = {sample.op for sample in (*written(), *captured())}
    missing = sorted(str(op) for op in RULES if op not in sampled)
    assert not missing


def test_static_numbers_are_arguments_of_ops_with_rules() -> None:
    for op, names in STATIC_NUMBERS.items():
        assert rule_for(op) is not None
        assert names <= {a.name for a in op._schema.arguments}
