"""Context parallelism: how ``scaled_dot_product_attention`` runs where the sequence is split over a mesh axis.

Nothing needs to be called: torch's own function on q, k, v that are sharded on their sequence dim is context parallel by itself.

- **Ulysses** (arXiv 2309.14509): an all-to-all gives each device all positions of some heads, another brings the output back. Heads that
  do not divide are split unevenly; key heads that several devices need are sent to each.
- **Ring** (Ring Attention, arXiv 2310.01889): queries stay, key and value blocks travel from device to device, each hop started before
  the block at hand is computed on. No device ever holds more than two travelling blocks of keys and values, of its share's size. Under a
  causal mask positions are dealt out in a zigzag, so that all devices have the same work (arXiv 2311.09431 on the imbalance).
- **Both**, on a mesh with two such axes, and beside axes that split the batch or the heads.

The name of the axis chooses: ``ulysses_cp`` (also ``ulysess_cp``) or ``ring_cp``. On an axis of another name it is Ulysses where
the axis splits the heads of queries and keys evenly, else the ring. `SdpaOption` overrides.
"""

from __future__ import annotations

import contextvars
import dataclasses
from typing import Any

import torch

from .. import hints
from ..client import attention as _attention


@dataclasses.dataclass(frozen=True, slots=True)
class SdpaOption:
    """Which mesh axes split attention's heads and which its sequence, whatever their names. A context, which may be nested.

    Holds for the axes among them that the sequence of q, k and v is sharded on. An axis that a mesh does not have is not parallel
    there, so one model definition serves any mesh.

    Args:
        ulysses_cp_dim: name of the axis for Ulysses.
        ring_cp_dim: name of the axis for the ring.

    Raises:
        TypeError: a name that is no string.
        ValueError: one name for both. In the call of attention: fewer query heads than devices for Ulysses.

    Example::

        >>> mesh = DeviceMesh("cpu", [0, 1], ("context",))
        >>> q = torch.rand(1, 2, 8, 4)
        >>> x = distribute_tensor(q, mesh, [Shard(2)])
        >>> with nn.SdpaOption(ring_cp_dim="context"):
        ...     out = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> torch.allclose(out.to_torch(), nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True), atol=1e-6)
        True
    """

    ulysses_cp_dim: str | None = None
    ring_cp_dim: str | None = None
    _entered: list[contextvars.Token] = dataclasses.field(
        default_factory=list, init=False, repr=False, compare=False, hash=False
    )

    def __post_init__(self) -> None:
        for field in ("ulysses_cp_dim", "ring_cp_dim"):
            name = getattr(self, field)
            if name is not None and not isinstance(name, str):
                raise TypeError(f"SdpaOption: {field} must be the name of a mesh axis or None, got {name!r}")
        if self.ulysses_cp_dim is not None and self.ulysses_cp_dim == self.ring_cp_dim:
            raise ValueError(
                f"SdpaOption: ulysses_cp_dim and ring_cp_dim are both {self.ring_cp_dim!r}; one axis can do one of them"
            )

    def __enter__(self) -> SdpaOption:  # noqa: PYI034 - typing.Self is not in Python 3.10
        chosen = {self.ulysses_cp_dim: "ulysses", self.ring_cp_dim: "ring"}
        chosen.pop(None, None)
        self._entered.append(_attention.insisted.set(chosen))  # type: ignore[arg-type]
        return self

    def __exit__(self, *_: object) -> None:
        _attention.insisted.reset(self._entered.pop())


SdpaOption.__init__ = hints.takes(SdpaOption.__init__)  # type: ignore[method-assign]


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    option: SdpaOption | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, with ``option`` in place of the names of mesh axes.

    Args:
        query: (…, heads, L, E).
        key, value: (…, key heads, S, E) and (…, key heads, S, Ev).
        option: see `SdpaOption`. All other arguments are torch's.

    Returns:
        (…, heads, L, Ev), of query's dtype, placed as query is.
    """
    call = torch.nn.functional.scaled_dot_product_attention
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if option is None:
        return call(query, key, value, attn_mask, dropout_p, **options)
    if not isinstance(option, SdpaOption):
        raise TypeError(f"scaled_dot_product_attention: option must be an SdpaOption or None, got {option!r}")
    with option:
        return call(query, key, value, attn_mask, dropout_p, **options)
