"""The attacks on the process backend that are played unchanged on engines, and the attacks of every test run.

The attacks left out need something that only the process backend has: a monitor outside, its own mounts, a cgroup of
Ringfence's that guestd can read. On gVisor, system calls end in gVisor's own kernel, which lacks most of what a filter
refuses; and some attacks measure seconds that gVisor's start alone takes (D16).
"""

from __future__ import annotations


def _ids(text: str) -> frozenset[str]:
    return frozenset(text.split())


REUSED: dict[str, frozenset[str]] = {
    "container": _ids(
        "A01 A02 A03 A06 A11 A12 A15 A23 A24 A25 A26 A27 A28 A31 A31-layer A31-openat2 A32 A33 B01 B01-pids "
        "B03 B04 B07 B11 B15 C01 C01-download C01-upload C02 C03 C07 D01 D02 D04 D05 D05-discipline D06 D07 "
        "D09 D10 D11 D13 D13-cpu D15 D16 D17 E01-clone3 E02 E03 E04 E05 E06 E07 E07-aio E08 E09 E10 E11 "
        "E11-ldt E11-personality E12 E13 E13-unknown E16 E17 E18 E19 E19-x32 E20 E21 E21-terminal E22 "
        "E22-memory E23 E24 E25 E25-filter F01 F02 F03 F03-sysv F04 F09 F12 F13 F14 F15 F16 F16-monitor F17 "
        "F18 F19 F20 F21 F22 F26 F27 F31 F32 F33 G01 G01-udp G02 G03 G04 G05 G06 G07 G08 G09 G10 G10-literal G11 "
        "G11-tls G12 G12-tls G13 G14 G15 G16 G18 G18-path G18-scope G20 G21 G23 G24 G25 G26 H01 H02 H02-boot "
        "G23-headers O23 O24 "
        "H02-cmdline H02-machine H03 H04 H05 H06 H11 H12 I01 I02 I03 I04 I05 I07 I07-agent J01 J02 J02-early "
        "J02-parent J03 J04 J05 J05-stop J06 J17-prlimit J17-signals J18 K01-deep K01-inside K01-sparse K02 "
        "K02-backslash K03 K04-download K04-upload K04-way K06 K07 K07-digest L01 L01-report L02 L03 L04 L05 "
        "L07 L09 L12 L12-optional L13 L12-report L15 L15-export L15-report L16 L17 L18 L19 O21 "
    ),
    "gvisor": _ids(
        "O23 O24 "
        "A01 A02 A03 A05 A06 A12 A14 A15 A24 A25 A26 A27 A28 A31 A32 A33 B04 B08 B10 D02 D04 D06 D10 D11 "
        "D15 D17 F09 F12 F14 F16 F17 F18 F19 F32 G01 G01-udp G02 G03 G05 G08 G09 H01 H02-machine "
        "H03 H04 H06 H11 H12 J01 J02 J02-early J03 J04 J06 J18 L12 L12-optional L12-report L13 L15 L15-export "
        "L15-report L16 L17 L18 L19 O21 "
    ),
}
NOT_OWN: dict[str, frozenset[str]] = {"container": frozenset(), "gvisor": frozenset({"F03-shm"})}
# Attacks in the tests of every change; `ringfence attack` and docs/attacks-engines.md have the rest too.
IN_EVERY_RUN: dict[str, frozenset[str]] = {
    "container": _ids(
        "A01 A15 A31 B01-pids B03 B04 B15 D01 E03 E08 E18 E24 E25 E25-filter F01 F15 G01 H01 H02 J02 J17-signals "
        "L12 L16 L19 "
    ),
    "gvisor": _ids(
        "A01 A03 A12 A15 A31 B04 D02 D04 D06 D10 D11 F12 F14 F19 G01 H01 H03 H04 H11 H12 J02 J03 L12 L16 L19 "
    ),
}
