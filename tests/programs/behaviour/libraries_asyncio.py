import asyncio
async def main():
    async def serve(r, w):
        w.write((await r.readline()).upper()); await w.drain(); w.close()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    r, w = await asyncio.open_connection(*server.sockets[0].getsockname())
    w.write(b"hello\n"); print(await r.read()); w.close()
    server.close()
    p = await asyncio.create_subprocess_exec("echo", "hi", stdout=asyncio.subprocess.PIPE)
    print((await p.communicate())[0])
    print(await asyncio.gather(*(asyncio.sleep(0.01, i) for i in range(3))))
asyncio.run(main())
