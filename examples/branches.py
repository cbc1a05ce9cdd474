"""Search a tree of agent steps: every branch is a copy of the running sandbox before it, with memory and files.

    python examples/branches.py

The task: from the numbers at hand, reach 24 by taking two and putting back their sum, difference or product.
An agent would propose the steps; here they are tried one after another, each in a sandbox of its own.
"""

from __future__ import annotations

import time

from ringfence import Sandbox

START = "numbers = [5, 5, 1]; path = []\nopen('log', 'w').close()"
STEP = """
a, b = numbers.pop({i}), numbers.pop({j})
numbers.append(a {op} b)
path.append(f'{{a}} {op} {{b}} = {{numbers[-1]}}')
with open('log', 'a') as log: print(path[-1], file=log)
(len(numbers), numbers)
"""
GOAL = 24


def steps(count: int) -> list[dict[str, object]]:
    pairs = [(i, j) for i in range(count) for j in range(count - 1)]  # the second is taken when the first is gone
    return [{"i": i, "j": j, "op": op} for op in "*+-" for i, j in pairs]


def search(box: Sandbox) -> str | None:
    """Return the log of the first branch that reaches the goal. All other branches are removed."""
    count = len(str(box.run("numbers").value).split(","))
    if count == 1:
        return box.files.read_text("log") if box.run(f"numbers == [{GOAL}]").value == "True" else None
    for step in steps(count):
        with box.fork() as branch:
            if branch.run(STEP.format(**step)).ok:
                found = search(branch)
                if found is not None:
                    return found
    return None


def main() -> None:
    begun = time.perf_counter()
    with Sandbox() as box:
        box.run(START).check()
        print(search(box) or "no branch reached it")
        print(f"the original still holds {box.run('numbers').value}; {time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":
    main()
