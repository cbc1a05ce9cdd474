"""What a policy that asks for a network must satisfy before anything starts. Imported only for such a policy."""

from __future__ import annotations

from ringfence.errors import PolicyError
from ringfence.policy.reach import MOST_PORTS, RESOLVER_PORT, listening_ports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.policy.model import Policy


def check_network(policy: Policy) -> None:
    """Raises PolicyError, and UnsupportedError where a package is missing, before anything starts."""
    ports = listening_ports(policy.network)
    if RESOLVER_PORT in ports:
        raise PolicyError(
            f"port {RESOLVER_PORT} cannot be permitted: inside, the resolver has it",
            key="network.ports",
            fix="remove it; names are looked up without it",
        )
    if len(ports) > MOST_PORTS:
        raise PolicyError(f"the network names {len(ports)} ports; the most is {MOST_PORTS}", key="network.ports")
    if policy.secrets or policy.network.rules:
        from ringfence.network import trust

        if trust.is_needed(policy.network, policy.secrets):
            trust.check_packages()
    if policy.secrets:
        from ringfence.network.swapping import Vault

        Vault(policy.secrets)  # a value that is not there, or cannot be kept, is told before anything starts
