"""Makes sandboxes on a folder from several threads and says how each kind ended, as JSON. Its own file is the guest.

many_sandboxes.py FOLDER THREADS EACH
many_sandboxes.py guest FOLDER SECONDS      tries to make protected names there, for so long, and says how many
"""

import json
import os
import sys
import threading
import time

NAMES = (".envrc", ".bashrc", ".mcp.json", ".profile", ".zshrc")
FOLDERS = (".claude", ".vscode")


def guest(folder: str, seconds: str) -> None:
    os.chdir(folder)
    made, end = 0, time.monotonic() + float(seconds)
    while time.monotonic() < end:
        for name in NAMES:
            try:
                fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except OSError:
                continue
            os.write(fd, b"of the guest")
            os.close(fd)
            made += 1
        for name in FOLDERS:
            try:
                os.mkdir(name)
            except OSError:
                continue
            made += 1
    print(made, "made")


def host(folder: str, threads: str, each: str) -> None:
    import warnings

    from ringfence import Mount, Policy, Sandbox

    warnings.simplefilter("ignore")
    with open(__file__) as file:
        code = file.read()
    kinds: dict[str, int] = {}
    lock = threading.Lock()

    def one() -> object:
        try:
            with Sandbox(policy=Policy(mounts=[Mount(folder, mode="rw")])) as box:
                result = box.exec(["python3", "-c", code, "guest", folder, "0.05"])
            told = sorted(denial.code for denial in (*result.denials, *box.denials()))
            return [result.status, result.reason, result.stdout.strip() + result.stderr[-300:], told]
        except Exception as error:  # whatever it is, the test says that it was none
            return repr(error)

    def several() -> None:
        for _ in range(int(each)):
            kind = json.dumps(one())
            with lock:
                kinds[kind] = kinds.get(kind, 0) + 1

    running = [threading.Thread(target=several) for _ in range(int(threads))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    print(json.dumps([[count, json.loads(kind)] for kind, count in kinds.items()]))


if sys.argv[1] == "guest":
    guest(*sys.argv[2:])
else:
    host(*sys.argv[1:])
