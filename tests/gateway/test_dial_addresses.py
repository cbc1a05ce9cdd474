"""Addresses that are never dialled, in every form they have."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.gateway.dial import fault, listed

EVERYTHING = ("0.0.0.0/0", "::/0")


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1", "100.63.255.255", "172.32.0.1"])
def test_public_addresses_are_dialled(address: str) -> None:
    assert fault(address, ()) is None


@pytest.mark.parametrize(
    "address",
    [
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "127.0.0.1",
        "127.9.9.9",
        "100.64.0.1",
        "198.18.0.1",
        "fd12::1",
        "fc00::1",
    ],
)
def test_private_addresses_need_a_range_of_the_policy(address: str) -> None:
    assert fault(address, ()) == "net.private-address"
    width = 128 if ":" in address else 32
    assert fault(address, (f"{address}/{width}",)) is None


@pytest.mark.parametrize(
    "address",
    [
        *("169.254.169.254", "169.254.0.1", "100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fe80::1", "febf::1"),
        *("fd00:ec2::23", "fd00:c1::a9fe:a9fe", "fd00:42::42", "fd00:a9fe:a9fe::1", "fd00:100::100:200"),
    ],
)
def test_metadata_and_link_local_are_open_to_nobody(address: str) -> None:
    assert fault(address, EVERYTHING) == "net.metadata-address"


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "0.1.2.3",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::ffff:127.0.0.1",
        "::ffff:0:127.0.0.1",
        "4000::1",
        "::ffff:1.1.1.1",
        "::127.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
        "2001:0:53aa::1",
        "ff02::1",
        "fe80::1%eth0",
        "127.1",
        "0x7f.0.0.1",
        "2130706433",
        "",
        "a.test",
    ],
)
def test_other_spellings_and_what_is_no_peer_are_open_to_nobody(address: str) -> None:
    assert fault(address, EVERYTHING) in ("net.bad-address", "net.metadata-address")


@given(st.integers(0, 2**32 - 1))
def test_an_ipv4_address_that_is_dialled_is_global(number: int) -> None:
    address = IPv4Address(number)
    if fault(str(address), ()) is None:
        assert address.is_global
        assert not address.is_multicast


@given(st.integers(0, 2**32 - 1))
def test_no_ipv6_form_of_an_ipv4_address_is_dialled(number: int) -> None:
    embedded = [0xFFFF00000000 | number, number, (0x64FF9B << 96) | number, (0x2002 << 112) | number << 80]
    assert [fault(str(IPv6Address(one)), EVERYTHING) is None for one in embedded] == [False] * 4


def test_names_of_the_hosts_own_file_are_found_as_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1 localhost\n10.1.2.3\tDb.Corp db # the old one: db2\n10.1.2.4 db\n\n# 10.9.9.9 db3\n")
    assert listed("db", str(file)) == ["10.1.2.3", "10.1.2.4"]
    assert listed("db.corp", str(file)) == ["10.1.2.3"]
    assert [listed(name, str(file)) for name in ("db2", "db3", "corp", "10.1.2.3", "b")] == [[]] * 5
    assert listed("db", str(tmp_path / "none")) == []
