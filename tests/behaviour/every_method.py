"""Calls every public method of Ringfence once, in a program whose own folder a guest has filled with modules.

Started by test_own_imports.py: `python agent.py TOP async|sync`. It is a copy of this file, in a folder that the guest
may write, or it is told to append that folder to its path. Everything it needs itself is imported before the guest
runs: what is imported later is Ringfence's doing. Prints how each call failed that did.
"""

import io
import os
import re
import signal
import sys

# In this order. Written for the async half; `await` and the like are taken out for the other.
CALLS = {
    "Policy.preset": "Policy.preset('dev')",
    "Network.open": "Network.open()",
    "Secret.from_env": "Secret.from_env('HOME', hosts=['example.com'])",
    "Secret.from_file": "Secret.from_file('TOKEN', top + '/file', hosts=['example.com'])",
    "Sandbox.plan": "plan = box.plan()",
    "Plan.explain": "plan.explain()",
    "Sandbox.start": "await box.start()",
    "Sandbox.exec": "assert (await box.exec(['python3', '-c', PLANT, here])).check()",
    "Policy.load": "Policy.load(top + '/policy.toml')",
    "Policy.loads": "Policy.loads('version = 1\\n[limits]\\ntimeout_s = 5\\n')",
    "Policy.to_toml": "box.policy.to_toml()",
    "Policy.explain": "box.policy.explain()",
    "Policy.replace": "Policy().replace(strict=True)",
    "Policy.must_allow": "Policy().must_allow(Policy())",
    "Policy.digest": "Policy().digest",
    "run": "result = await run_async('print(1)')",
    "Result.ok": "result.ok",
    "Result.stdout": "result.stdout",
    "Result.stderr": "result.stderr",
    "Result.value": "result.value",
    "Result.check": "result.check()",
    "Result.render": "result.render()",
    "Result.to_dict": "result.to_dict()",
    "Enforcement.weaker": "result.enforcement.weaker",
    "Sandbox.run": "shown = await box.run('import sys; sys.displayhook(1); {1: 2}')",
    "Output.text": "output = shown.outputs[-1]; output.text",
    "Output.html": "output.html",
    "Output.png": "output.png",
    "Output.svg": "output.svg",
    "Output.json": "output.json",
    "Sandbox.state": "box.state",
    "Sandbox.backend": "box.backend",
    "Sandbox.enforcement": "box.enforcement",
    "Sandbox.spawn": "process = await box.spawn(['cat'])",
    "Process.running": "process.running",
    "Process.write": "await process.write('words')",
    "Process.signal": "await process.signal(signal.SIGCONT)",
    "Sandbox.processes": "await box.processes()",
    "Sandbox.process": "await box.process(process.id)",
    "Process.close_stdin": "await process.close_stdin()",
    "Process.__iter__": "[event async for event in process]",
    "Process.wait": "await process.wait(timeout_s=9)",
    "Process.kill": "await process.kill()",
    "Sandbox.pty": "terminal = await box.pty(['cat'])",
    "Pty.resize": "await terminal.resize(cols=90, rows=30); await terminal.kill()",
    "Sandbox.session": "session = await box.session('s')",
    "Sandbox.sessions": "await box.sessions()",
    "Session.run": "await session.run('print(tool(1))')",
    "Session.interrupt": "await session.interrupt()",
    "Session.spawn": "await (await session.spawn('1')).wait()",
    "Session.restart": "await session.restart()",
    "Session.close": "await session.close()",
    "Files.write": "await files.write('d/f', 'words'); await files.write('d/g', io.BytesIO(b'bytes'))",
    "Files.read": "await files.read('d/f')",
    "Files.read_text": "await files.read_text('d/f')",
    "Files.chunks": "[piece async for piece in files.chunks('d/f')]",
    "Files.list": "[info async for info in files.list('.', recursive=True, pattern='*')]",
    "Files.search": "[match async for match in files.search('w.r', regex=True)]",
    "Files.stat": "await files.stat('d/f')",
    "Files.exists": "await files.exists('d/f')",
    "Files.mkdir": "await files.mkdir('e')",
    "Files.rename": "await files.rename('d/g', 'd/h')",
    "Files.chmod": "await files.chmod('d/h', 0o600)",
    "Files.remove": "await files.remove('d/h')",
    "Files.watch": "watch = await files.watch('.'); await files.write('new', '1')",
    "Watch.__next__": "await watch.__anext__()",
    "Watch.close": "await watch.close()",
    "Files.upload": "await files.upload(top + '/folder', 'up')",
    "Files.download": "await files.download('d', top + '/down')",
    "Files.pack": "tar = b''.join([piece async for piece in files.pack('d')])"
    "; zipped = b''.join([piece async for piece in files.pack('d', format='zip')])",
    "Files.unpack": "await files.unpack(tar, 'from-tar'); await files.unpack(zipped, 'from-zip', format='zip')",
    "Files.usage": "await files.usage()",
    "Gateway.set": "await box.network.set(Network(allow=['example.com', 'example.org']))",
    "Gateway.log": "await box.exec(['python3', '-c', REQUESTS]); await box.network.log()",
    "Gateway.summary": "await box.network.summary()",
    "Sandbox.expose": "address = await box.expose(8000)",
    "Address.close": "await address.close()",
    "Sandbox.usage": "await box.usage()",
    "Sandbox.denials": "await box.denials()",
    "Sandbox.set_lifetime": "await box.set_lifetime(60)",
    "Sandbox.pause": "await box.pause()",
    "Sandbox.resume": "await box.resume()",
    "Sandbox.snapshot": "snapshot = await box.snapshot(); await files.write('d/f', 'other\\n')",
    "Snapshot.diff": "later = await box.snapshot(); snapshot.diff(later)",
    "Snapshot.export": "snapshot.export(top + '/kept')",
    "Snapshot.load": "Snapshot.load(top + '/kept')",
    "Sandbox.rollback": "await box.rollback(snapshot)",
    "Snapshot.delete": "later.delete()",
    "Sandbox.fork": "await (await box.fork()).close()",
    "Sandbox.close": "await box.close()",
    "SandboxManager.sandbox": "manager = AsyncSandboxManager(policy=policy, state=top + '/state')"
    "; await manager.__aenter__(); one = manager.sandbox(); await one.start()",
    "SandboxManager.sandboxes": "(info,) = await manager.sandboxes()",
    "SandboxManager.get": "await manager.get(info.id)",
    "SandboxManager.environment": "environment = await manager.environment('agent')",
    "SandboxManager.environments": "await manager.environments()",
    "Environment.run": "await environment.run('1')",
    "Environment.exec": "await environment.exec(['true'])",
    "Environment.sandbox": "environment.sandbox()",
    "Environment.sandboxes": "await environment.sandboxes()",
    "Environment.usage": "await environment.usage()",
    "Environment.requests": "await environment.requests()",
    "Environment.history": "await environment.history()",
    "Environment.remove": "await environment.remove()",
    "SandboxManager.close": "await manager.close()",
}

PLANT = """
import sys
here = sys.argv[1]
for name in open(here + "/names.txt").read().split():
    with open(f"{here}/{name}.py", "w") as file:
        file.write(open(here + "/planted.txt").read())
"""
REQUESTS = """
import http.client
for port in (80, 443):
    try:
        connection = http.client.HTTPConnection("example.com", port, timeout=5)
        connection.request("GET", "/")
        connection.getresponse().read()
    except OSError:
        pass
"""


def sync(text: str) -> str:
    for pattern, replacement in (
        (r"\bAsync([A-Z])", r"\1"),
        (r"_async\b", ""),
        (r"__a(next|enter)__", r"__\1__"),
        (r"\b(await|async) ", ""),
    ):
        text = re.sub(pattern, replacement, text)
    return text


async def main(top: str, here: str, *, asyncs: bool) -> None:
    import ringfence
    from ringfence import Mount, Network, Policy

    policy = Policy(mounts=[Mount(here, mode="rw")], network=Network(allow=["example.com"]))
    names: dict[str, object] = {"top": top, "here": here, "policy": policy, "io": io}
    names |= {"signal": signal, "PLANT": PLANT, "REQUESTS": REQUESTS}
    made = (ringfence.AsyncSandbox if asyncs else ringfence.Sandbox)(policy=policy, tools={"tool": lambda value: value})
    names |= {"box": made, "files": made.files}
    for name, text in CALLS.items():
        text = text if asyncs else sync(text)
        code = compile(text, name, "exec", flags=0x2000)  # with await at the top
        try:
            for word in set(ringfence.__all__).intersection(re.findall(r"\w+", text)):
                names[word] = getattr(ringfence, word)  # not before: it may be what imports something
            done = eval(code, names)
            if hasattr(done, "send"):  # a coroutine
                await done
        except Exception as error:  # reported to the test, which knows the calls that may fail
            print(f"{name}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    where, half = sys.argv[1:3]
    folder = os.path.realpath(where + "/project")
    if os.path.dirname(os.path.realpath(__file__)) != folder:
        sys.path.append(folder)
    if half == "async":
        import asyncio

        asyncio.run(main(where, folder, asyncs=True))
    else:
        try:
            main(where, folder, asyncs=False).send(None)  # nothing in it waits: no loop runs, as in a sync program
        except StopIteration:
            pass  # it is over
