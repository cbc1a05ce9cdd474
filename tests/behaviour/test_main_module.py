"""`__main__` inside is what a script's is: names, pickles, child processes."""

from __future__ import annotations

import ringfence
from ringfence.backends import Backend
from ringfence.policy.image import Image


def test_the_main_guard_holds(backend: Backend) -> None:
    result = ringfence.run("if __name__ == '__main__':\n    print('main')", backend=backend)
    assert result.stdout == "main\n"


def test_main_holds_only_what_a_script_has(backend: Backend) -> None:
    result = ringfence.run("sorted(globals())", backend=backend)
    names = ["__builtins__", "__doc__", "__loader__", "__name__", "__package__", "__spec__"]
    assert result.value == repr(names)


def test_our_own_modules_are_not_in_the_guests_interpreter(backend: Backend) -> None:
    code = "import sys\n[m for m in sys.modules if 'ringfence' in m]"
    assert ringfence.run(code, backend=backend).value == "[]"


def test_a_class_of_main_can_be_pickled(backend: Backend) -> None:
    code = """
import pickle, copy
class Point:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x
(pickle.loads(pickle.dumps(Point(3))) == Point(3), Point.__module__, copy.deepcopy(Point(1)).x)
"""
    assert ringfence.run(code, backend=backend).value == "(True, '__main__', 1)"


def test_dataclasses_typing_and_inspect_find_their_module(backend: Backend) -> None:
    code = """
from __future__ import annotations
import dataclasses, inspect, typing
@dataclasses.dataclass
class Row:
    a: int
    b: list[str] = dataclasses.field(default_factory=list)
(Row(1), typing.get_type_hints(Row)["a"], inspect.signature(Row.__eq__))
"""
    result = ringfence.run(code, backend=backend)
    assert result.value == "(Row(a=1, b=[]), <class 'int'>, <Signature (self, other)>)", result.stderr


def test_multiprocessing_by_fork_runs_functions_of_main(backend: Backend) -> None:
    code = """
import multiprocessing as mp
def square(n): return n * n
if __name__ == "__main__":
    with mp.get_context("fork").Pool(3) as pool:
        print(pool.map(square, range(5)))
"""
    result = ringfence.run(code, backend=backend)
    assert (result.stdout, result.stderr, result.exit_code) == ("[0, 1, 4, 9, 16]\n", "", 0)


def test_multiprocessing_by_spawn_runs_functions_of_modules(backend: Backend) -> None:
    code = """
import math, multiprocessing as mp
if __name__ == "__main__":
    context = mp.get_context("spawn")
    with context.Pool(2) as pool:
        print(pool.map(math.factorial, range(5)))
    q = context.Queue()
    p = context.Process(target=print, args=("child",))
    p.start(); p.join()
    print(p.exitcode)
"""
    result = ringfence.run(code, backend=backend)
    assert (result.stdout, result.stderr, result.exit_code) == ("[1, 1, 2, 6, 24]\nchild\n0\n", "", 0)


def test_processes_are_forks_unless_the_code_chooses_another_way(backend: Backend) -> None:
    """Holds on Python 3.14 too, whose default, a fork server, needs the main program in a file."""
    code = """
import multiprocessing
first = multiprocessing.get_start_method(allow_none=True), multiprocessing.get_start_method()
multiprocessing.set_start_method("spawn", force=True)
print(*first, multiprocessing.get_start_method())
"""
    assert ringfence.run(code, backend=backend).stdout == "None fork spawn\n"


def test_a_process_pool_of_concurrent_futures_works() -> None:
    code = """
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
def twice(n): return 2 * n
if __name__ == "__main__":
    with ProcessPoolExecutor(2) as a, ThreadPoolExecutor(4) as b:
        print(list(a.map(twice, range(3))), list(b.map(twice, range(3))))
"""
    assert ringfence.run(code).stdout == "[0, 2, 4] [0, 2, 4]\n"


def test_a_child_of_os_fork_is_waited_for_and_its_exit_code_read() -> None:
    code = """
import os
pid = os.fork()
if pid == 0:
    print("child", flush=True)
    os._exit(7)
os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    result = ringfence.run(code)
    assert (result.stdout, result.value) == ("child\n", "7")


def test_sys_executable_starts_an_interpreter_with_the_same_packages() -> None:
    program = "import numpy; print(numpy.__name__)"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {program!r}], check=True)"
    assert ringfence.run(code).stdout == "numpy\n"


def test_modules_of_the_workspace_can_be_imported() -> None:
    assert ringfence.run("open('mine.py', 'w').write('x = 5')\nimport mine\nmine.x").value == "5"


def test_random_numbers_differ_between_runs() -> None:
    code = "import random, os, uuid, secrets\n(random.random(), uuid.uuid4(), secrets.token_hex(4), os.urandom(4))"
    assert len({ringfence.run(code).value for _ in range(4)}) == 4


def test_a_preloaded_module_is_there_and_seeded_anew() -> None:
    image = Image(preload=["numpy"])
    numbers = "numpy.random.random(), numpy.random.default_rng().random()"
    code = f"import sys\nhad = 'numpy' in sys.modules\nimport numpy\n(had, {numbers})"
    values = {ringfence.run(code, image=image).value for _ in range(3)}
    assert len(values) == 3
    assert all(value is not None and value.startswith("(True, ") for value in values)


def test_a_module_that_cannot_be_preloaded_is_an_image_error_with_the_reason() -> None:
    import pytest

    with pytest.raises(
        ringfence.ImageError, match="cannot preload no_such_module_at_all: ModuleNotFoundError"
    ) as caught:
        ringfence.run("1", image=Image(preload=["no_such_module_at_all"]))
    assert caught.value.fix is not None
