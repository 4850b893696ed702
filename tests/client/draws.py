"""What draws random numbers, in every way that torch has: each takes a tensor and one of probabilities, both of X's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

X = torch.linspace(-2, 2, 48).reshape(2, 4, 6)
P = torch.linspace(0.05, 0.95, 48).reshape(2, 4, 6)

DRAWS: dict[str, Callable[[Any, Any], Any]] = {
    "rand_like": lambda x, p: torch.rand_like(x),
    "randn_like": lambda x, p: torch.randn_like(x),
    "randn_like double": lambda x, p: torch.randn_like(x, dtype=torch.float64),
    "rand_like bf16": lambda x, p: torch.rand_like(x, dtype=torch.bfloat16),
    "rand_like transposed": lambda x, p: torch.rand_like(x.transpose(0, 2)),
    "randint_like": lambda x, p: torch.randint_like(x, 10),
    "randint_like bounds": lambda x, p: torch.randint_like(x, -5, 100),
    "uniform_": lambda x, p: x.uniform_(-1, 3),
    "normal_": lambda x, p: x.normal_(2, 3),
    "normal_ of a view": lambda x, p: (x[:, 1:, ::2].normal_(), x),
    "exponential_": lambda x, p: x.exponential_(2.0),
    "geometric_": lambda x, p: x.geometric_(0.3),
    "cauchy_": lambda x, p: x.cauchy_(),
    "log_normal_": lambda x, p: x.log_normal_(),
    "random_": lambda x, p: x.random_(0, 50),
    "random_ of ints": lambda x, p: x.long().random_(),
    "bernoulli": lambda x, p: torch.bernoulli(p),
    "bernoulli_": lambda x, p: x.bernoulli_(0.4),
    "bernoulli_ by tensor": lambda x, p: x.bernoulli_(p),
    "multinomial": lambda x, p: torch.multinomial(p[0], 3),
    "multinomial again": lambda x, p: torch.multinomial(p[0], 8, replacement=True),
    "normal of tensors": lambda x, p: torch.normal(x, p),
    "normal of a mean": lambda x, p: torch.normal(x, 1.0),
    "normal of a std": lambda x, p: torch.normal(0.0, p),
    "poisson": lambda x, p: torch.poisson(p * 10),
    "gamma": lambda x, p: torch._standard_gamma(p + 1),
    "dirichlet": lambda x, p: torch._sample_dirichlet(p + 1),
    "binomial": lambda x, p: torch.binomial(torch.full_like(p, 10), p),
    "dropout": lambda x, p: F.dropout(x, 0.5),
    "dropout in place": lambda x, p: F.dropout(x, 0.5, inplace=True),
    "alpha_dropout": lambda x, p: F.alpha_dropout(x, 0.5, training=True),
    "feature_alpha_dropout": lambda x, p: F.feature_alpha_dropout(x, 0.5, training=True),
    "dropout1d": lambda x, p: F.dropout1d(x, 0.5),
    "dropout2d": lambda x, p: F.dropout2d(x[None], 0.5),
    "rrelu": lambda x, p: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x, p: F.gumbel_softmax(x, hard=True),
    "new_empty.normal_": lambda x, p: x.new_empty(4, 4).normal_(),
    "trunc_normal_": lambda x, p: nn.init.trunc_normal_(x),
    "xavier_uniform_": lambda x, p: nn.init.xavier_uniform_(x),
    "orthogonal_": lambda x, p: nn.init.orthogonal_(x[0]),
    "rand on the device": lambda x, p: x + torch.rand(6, device=x.device),
    "randperm on the device": lambda x, p: x[:, :, torch.randperm(6, device=x.device)],
    "randperm": lambda x, p: x[:, torch.randperm(4)],
    "attention dropout": lambda x, p: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "distribution": lambda x, p: (
        torch.distributions.Normal(x, p).rsample() + torch.distributions.Categorical(p).sample()[..., None]
    ),
}

#: Those whose results are also summed.
SUMS = {"distribution", "orthogonal_", "gumbel_softmax", "attention dropout"}
