"""A port inside gets an address outside, and only that port does."""

from __future__ import annotations

import asyncio

import pytest

from ringfence import AsyncSandbox
from ringfence.testing.checks.reaching import SERVER

pytestmark = pytest.mark.everywhere


def test_asyncio_callers_have_it_too() -> None:
    async def main() -> bytes:
        async with AsyncSandbox() as box:
            (await box.run(SERVER)).check()
            async with box.expose(8000) as address:
                reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(b"GET /3 HTTP/1.0\r\n\r\n")
                data = await reader.read()
                writer.close()
                return data

    assert asyncio.run(main()).endswith(b"hello hello hello ")
