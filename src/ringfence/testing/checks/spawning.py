"""Checks of spawn(): events in order, input to a running process, signals, and an end of the whole process tree."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from ringfence import Limits, Policy, PolicyError, Sandbox
from ringfence.events import Exit, Gap, Stderr, Stdout
from ringfence.testing.model import MakeSandbox, in_box, raises, with_maker

if TYPE_CHECKING:
    from ringfence.types import Process


def lives(box: Sandbox, marker: str) -> bool:
    """Return whether a process with this argument runs inside."""
    code = f"""
import os
found = []
for p in filter(str.isdigit, os.listdir("/proc")):
    try: text = open(f"/proc/{{p}}/cmdline").read()
    except OSError: continue
    if {marker!r} in text.split("\\0") and int(p) != os.getpid(): found.append(p)
print(bool(found))
"""
    return box.exec(["python3", "-c", code]).stdout == "True\n"


def events_come_in_order_and_the_exit_is_last(box: Sandbox) -> None:
    script = "echo a; sleep 0.05; echo b >&2; sleep 0.05; echo c; exit 3"
    with box.spawn(["sh", "-c", script]) as process:
        events = list(process)
    assert [type(event) for event in events] == [Stdout, Stderr, Stdout, Exit]
    assert [(e.data, e.text, e.cursor) for e in events if isinstance(e, Stdout | Stderr)] == [
        (b"a\n", "a\n", 2),
        (b"b\n", "b\n", 4),
        (b"c\n", "c\n", 6),
    ]
    last = events[-1]
    assert isinstance(last, Exit)
    assert (last.result.exit_code, last.result.stdout, last.result.stderr) == (3, "a\nc\n", "b\n")
    assert list(process) == []


def output_is_seen_while_the_program_runs(box: Sandbox) -> None:
    with box.spawn(["sh", "-c", "echo ready; sleep 60"]) as process:
        first = next(iter(process))
        assert isinstance(first, Stdout)
        assert (first.text, process.running) == ("ready\n", True)


def a_character_cut_between_chunks_is_whole_in_the_text(box: Sandbox) -> None:
    text = "日🦊".encode() + b"\xe6"
    code = f"import os, time\nfor b in {text!r}: os.write(1, bytes([b])); time.sleep(0.01)"
    with box.spawn(["python3", "-c", code]) as process:
        events = [event for event in process if isinstance(event, Stdout)]
        result = process.wait()
    assert "".join(event.text for event in events) == result.stdout == "日🦊\ufffd"


def a_dialogue_over_stdin_and_stdout(box: Sandbox) -> None:
    with box.spawn(["python3", "-c", "while True: print(input().upper(), flush=True)"]) as process:
        events = iter(process)
        for word in ("one", "zwei"):
            process.write(word + "\n")
            event = next(events)
            assert isinstance(event, Stdout)
            assert event.text == word.upper() + "\n"
        process.close_stdin()
        result = process.wait()
    assert (result.exit_code, "EOFError" in result.stderr) == (1, True)


def writing_and_reading_far_more_than_buffers_hold_does_not_lock_up(box: Sandbox) -> None:
    """F17: the program floods output while its input is still being written, and no thread reads meanwhile."""
    data = b"x" * (6 << 20)
    with box.spawn(["cat"]) as process:
        process.write(data)
        process.close_stdin()
        events = list(process)
        result = process.wait()
    seen = sum(len(e.data) for e in events if isinstance(e, Stdout))
    lost = sum(e.lost_bytes for e in events if isinstance(e, Gap))
    assert (result.status, result.usage.output_bytes, seen + lost) == ("ok", len(data), len(data))
    assert lost > 0
    assert result.truncated


def a_reader_who_keeps_up_loses_nothing(box: Sandbox) -> None:
    with box.spawn(["head", "-c", "20000000", "/dev/zero"]) as process:
        sizes = [len(event.data) for event in process if isinstance(event, Stdout)]
    assert sum(sizes) == 20_000_000


def a_slow_reader_holds_the_program_back_instead_of_losing_output(box: Sandbox) -> None:
    with box.spawn(["head", "-c", "4000000", "/dev/zero"]) as process:
        time.sleep(0.5)
        events = list(process)
    assert sum(len(e.data) for e in events if isinstance(e, Stdout)) == 4_000_000
    assert not any(isinstance(event, Gap) for event in events)


def writing_after_the_end_of_input_or_of_the_program_is_a_broken_pipe(box: Sandbox) -> None:
    with box.spawn(["sleep", "60"]) as process:
        process.close_stdin()
        with raises(BrokenPipeError, match="sleep"):
            process.write("x")
    with box.spawn(["true"]) as process:
        process.wait()
        with raises(BrokenPipeError, match="true"):
            process.write("x")


def a_program_that_closes_its_input_breaks_the_pipe(box: Sandbox) -> None:
    with box.spawn(["sh", "-c", "exec 0<&-; echo closed; sleep 60"]) as process:
        assert isinstance(next(iter(process)), Stdout)
        with raises(BrokenPipeError):
            process.write(b"x" * (8 << 20))


def signals_reach_the_program(box: Sandbox) -> None:
    script = "trap 'echo hup' HUP; trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.02; done"
    with box.spawn(["sh", "-c", script]) as process:
        events = iter(process)
        next(events)
        process.signal(signal.SIGHUP)
        event = next(events)
        assert isinstance(event, Stdout)
        assert event.text == "hup\n"
        process.signal(signal.SIGTERM)
        result = process.wait(timeout_s=10)
    assert (result.exit_code, result.stdout) == (5, "up\nhup\nbye\n")


def an_interrupt_is_a_keyboard_interrupt_in_python(box: Sandbox) -> None:
    with box.spawn(["python3", "-c", "import time; print(1, flush=True); time.sleep(60)"]) as process:
        next(iter(process))
        process.signal(signal.SIGINT)
        result = process.wait(timeout_s=10)
    assert (result.signal, "KeyboardInterrupt" in result.stderr) == (2, True)


def wait_gives_up_at_its_timeout_and_kills_nothing(box: Sandbox) -> None:
    with box.spawn(["sleep", "60"]) as process:
        started = time.monotonic()
        with raises(TimeoutError, match=r"sleep still runs after 0\.2 s"):
            process.wait(timeout_s=0.2)
        assert time.monotonic() - started < 15
        assert process.running
        for wrong in ("x", float("nan"), -1):
            with raises(PolicyError, match="it is a number from 0 on, or None"):
                process.wait(timeout_s=wrong)  # type: ignore[arg-type]  # the mistake


def kill_ends_the_tree_and_may_be_called_again(box: Sandbox) -> None:
    process = box.spawn(["sh", "-c", "sleep 4242 & echo up; wait"])
    next(iter(process))
    result = process.kill()
    assert (result.status, result.reason, result.signal) == ("killed", "caller", 9)
    assert process.kill() is result
    assert not process.running
    assert not lives(box, "4242")


DAEMON = """
import os, signal, sys, time
for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(n, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", sys.argv[1]])
    os._exit(0)
os.wait()
print("up", flush=True)
time.sleep(60)
"""


def leaving_with_kills_daemons_that_ignore_signals_too(box: Sandbox) -> None:
    with box.spawn(["python3", "-c", DAEMON, "4343"]) as process:
        next(iter(process))
        assert lives(box, "4343")
    assert not lives(box, "4343")
    assert box.exec(["echo", "usable"]).stdout == "usable\n"


def an_exception_in_the_block_kills_it_too(box: Sandbox) -> None:
    with raises(ZeroDivisionError), box.spawn(["sleep", "4444"]):
        _ = 1 / 0
    assert not lives(box, "4444")


def killing_one_leaves_the_others(box: Sandbox) -> None:
    others = [box.spawn(["sh", "-c", "echo up; cat"]) for _ in range(3)]
    with box.spawn(["sleep", "60"]) as victim:
        victim.kill()
    for number, process in enumerate(others):
        process.write(str(number))
        process.close_stdin()
        assert process.wait(timeout_s=10).stdout == f"up\n{number}"


def a_server_that_an_earlier_command_left_running_survives_the_kill_of_a_later_one(box: Sandbox) -> None:
    box.exec(["sh", "-c", "setsid sleep 4747 & sleep 0.05"])
    with box.spawn(["python3", "-c", DAEMON, "4848"]) as process:
        next(iter(process))
    assert box.exec(["sleep", "60"], timeout_s=0.2).status == "timeout"
    assert (lives(box, "4747"), lives(box, "4848")) == (True, False)


def several_at_once_are_listed_with_what_they_are(box: Sandbox) -> None:
    first, second = box.spawn(["sleep", "60"]), box.spawn(["true"])
    second.wait()
    assert [(info.id, info.argv, info.running) for info in box.processes()] == [
        (first.id, ("sleep", "60"), True),
        (second.id, ("true",), False),
    ]
    assert box.process(first.id) is first
    with raises(LookupError, match="p-none"):
        box.process("p-none")
    first.kill()
    assert [info.running for info in box.processes()] == [False, False]


def the_end_is_known_without_waiting_for_it(box: Sandbox) -> None:
    process = box.spawn(["true"])
    deadline = time.monotonic() + 10
    while process.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not process.running


def a_caller_who_comes_back_after_the_deadline_hears_what_really_happened(box: Sandbox) -> None:
    done = box.spawn(["sh", "-c", "echo early; exit 6"], timeout_s=1)
    flood = box.spawn(["head", "-c", "3000000", "/dev/zero"], timeout_s=1)
    late = box.spawn(["sleep", "60"], timeout_s=1)
    time.sleep(2.5)
    assert [(p.wait().status, p.wait().exit_code) for p in (done, late)] == [("error", 6), ("timeout", None)]
    # its reader was away, so it stood still at the window and the clock took it; nothing it wrote before is lost
    result = flood.wait()
    assert (result.status, result.usage.output_bytes >= 1 << 19) == ("timeout", True)


def a_spawned_program_has_a_timeout_of_its_own(box: Sandbox) -> None:
    with box.spawn(["sleep", "60"], timeout_s=0.3) as process:
        events = list(process)
    last = events[-1]
    assert isinstance(last, Exit)
    assert (last.result.status, last.result.reason) == ("timeout", "wall-clock")


def without_with_it_lives_as_long_as_the_sandbox(make: MakeSandbox) -> None:
    with make() as box:
        process: Process = box.spawn(["sleep", "60"])
        assert process.running
    assert (process.running, process.wait().status, process.wait().reason) == (False, "killed", "caller")


def output_after_a_gap_is_told_with_what_is_missing(make: MakeSandbox) -> None:
    with make(policy=Policy(limits=Limits(output="1K"))) as box:
        with box.spawn(["cat"]) as process:
            process.write(b"y" * (5 << 20))
            process.close_stdin()
            process.wait()
            events = list(process)
    assert isinstance(events[0], Gap)
    kinds = [type(event) for event in events]
    assert (kinds.count(Gap), kinds[-1]) == (1, Exit)
    cursors = [event.cursor for event in events]
    assert cursors == sorted(cursors)
    assert cursors[-1] == 5 << 20


CHECKS = (
    in_box(events_come_in_order_and_the_exit_is_last),
    in_box(output_is_seen_while_the_program_runs),
    in_box(a_character_cut_between_chunks_is_whole_in_the_text),
    in_box(a_dialogue_over_stdin_and_stdout),
    in_box(writing_and_reading_far_more_than_buffers_hold_does_not_lock_up),
    in_box(a_reader_who_keeps_up_loses_nothing),
    in_box(a_slow_reader_holds_the_program_back_instead_of_losing_output),
    in_box(writing_after_the_end_of_input_or_of_the_program_is_a_broken_pipe),
    in_box(a_program_that_closes_its_input_breaks_the_pipe),
    in_box(signals_reach_the_program),
    in_box(an_interrupt_is_a_keyboard_interrupt_in_python),
    in_box(wait_gives_up_at_its_timeout_and_kills_nothing),
    in_box(kill_ends_the_tree_and_may_be_called_again),
    in_box(leaving_with_kills_daemons_that_ignore_signals_too),
    in_box(an_exception_in_the_block_kills_it_too),
    in_box(killing_one_leaves_the_others),
    in_box(a_server_that_an_earlier_command_left_running_survives_the_kill_of_a_later_one),
    in_box(several_at_once_are_listed_with_what_they_are),
    in_box(the_end_is_known_without_waiting_for_it),
    in_box(a_caller_who_comes_back_after_the_deadline_hears_what_really_happened),
    in_box(a_spawned_program_has_a_timeout_of_its_own),
    with_maker(without_with_it_lives_as_long_as_the_sandbox),
    with_maker(output_after_a_gap_is_told_with_what_is_missing),
)
