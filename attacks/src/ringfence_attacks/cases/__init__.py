"""The attacks on the process backend. The letter of a module is a chapter of the catalogue."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence_attacks.case import Attack


def all_cases() -> tuple[Attack, ...]:
    """Import every module of cases and return all cases, module by module."""
    from ringfence_attacks.cases import (
        a_files,
        a_host_reads,
        a_mounts,
        b_proc,
        c_races,
        d_processes,
        d_terminals,
        e_kernel,
        f_exhaustion,
        f_host,
        g_gateway,
        g_network,
        g_requests,
        h_leaks,
        i_secrets,
        j_spoofing,
        k_files,
        k_images,
        k_snapshots,
        k_transfers,
        l_imports,
        l_next_command,
        l_persistence,
        o_library,
    )

    modules = (
        a_files,
        a_host_reads,
        a_mounts,
        b_proc,
        c_races,
        d_processes,
        d_terminals,
        e_kernel,
        f_exhaustion,
        f_host,
        g_gateway,
        g_network,
        g_requests,
        h_leaks,
        i_secrets,
        j_spoofing,
        k_files,
        k_images,
        k_snapshots,
        k_transfers,
        l_imports,
        l_next_command,
        l_persistence,
        o_library,
    )
    return tuple(case for module in modules for case in module.CASES)
