"""What is allowed: the policy's values, loading, narrowing, explaining. Imports nothing above values and errors."""

from __future__ import annotations

from ringfence.policy.checks import format_size, parse_size
from ringfence.policy.image import Image
from ringfence.policy.model import Limits, Mount, Network, Policy, Quota, Rule
from ringfence.policy.secrets import Secret

__all__ = [
    "Image",
    "Limits",
    "Mount",
    "Network",
    "Policy",
    "Quota",
    "Rule",
    "Secret",
    "format_size",
    "parse_size",
]
