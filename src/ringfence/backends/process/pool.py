"""The sandboxes of this library process: zygote, templates, spares, and the thread that builds spares and cleans up.

A spare is a sandbox that is built and fenced and has never run guest code. Each is given out once. Spares are kept only
for policies that name no host files, because host files may change.
"""

from __future__ import annotations

import _queue
import _thread
import errno
import os
import time

from ringfence.backends.process.box import START_S, ProcessBox
from ringfence.backends.process.zygote import Template, Zygote
from ringfence.errors import RingfenceError, SandboxError, StartTimeoutError, UnsupportedError
from ringfence.host import lifecycle, uids, zygote_start
from ringfence.host.cgroups import GroupLimits, find_or_delegable
from ringfence.shared import fast_stdlib
from ringfence.shared.framing import OURS, RESERVE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable

    from ringfence.backends.process.zygote import Template
    from ringfence.host.cgroups import Group, Tree
    from ringfence.host.uids import HeldUid
    from ringfence.plan.model import LinuxPlan
    from ringfence.plan.rootfs.interpreter import Interpreter

_MOST_PROCESSES = 4_194_304  # the kernel's own limit: it refuses a larger pids.max
_SHELVES = 32
_MOST_SPARES = 4
_SPARE_IDLE_S = 60.0
_REFILL_AFTER_S = 0.004
_FIRST_REFILL_S = 0.03  # a program that runs once and ends does not pay for a spare that it never uses


# ── whether the caller has closed our descriptors ────────────────────────────────────────────────────
#
# Daemons close every descriptor. We therefore keep one that nothing else uses: when its number leads to another file,
# or to none, no descriptor of this process can be trusted to be ours.


class _Sentinel:
    """A descriptor that nothing else uses. Closed by the caller once its number leads elsewhere."""

    def __init__(self) -> None:
        self._fd = -1
        self._inode = 0

    def open(self) -> None:
        """Idempotent."""
        if self._fd < 0:
            self._fd = os.memfd_create("ringfence", os.MFD_CLOEXEC)
            self._inode = os.fstat(self._fd).st_ino

    def was_closed(self) -> bool:
        """Return whether the caller has closed our descriptors since `open`."""
        return self._fd >= 0 and not self._is_ours()

    def close(self) -> None:
        """Close the descriptor, unless the caller has closed it."""
        if self._fd >= 0 and self._is_ours():
            os.close(self._fd)
        self.disown_descriptors()

    def disown_descriptors(self) -> None:
        """Drop the descriptor without closing it: the caller may have reused the number."""
        self._fd = -1

    def _is_ours(self) -> bool:
        try:
            return os.fstat(self._fd).st_ino == self._inode
        except OSError:
            return False


_sentinel = _Sentinel()


class Templates:
    """The zygote of a pool and the templates, one for each view. All are made again when the zygote is gone.

    Safe from several threads.
    """

    def __init__(self, interpreter: Interpreter, preload: tuple[str, ...], tree: Tree | None) -> None:
        self._interpreter = interpreter
        self._preload = preload
        self._tree = tree
        self._lock = _thread.allocate_lock()
        self._zygote: Zygote | None = None
        self._of_view: dict[int, Template] = {}
        self._outgrown: list[Template] = []  # replaced, and still with sandboxes

    def get(self, plan: LinuxPlan) -> Template:
        """Return the template for a plan. Policies that differ in limits alone share a view, and with it a template."""
        view = id(plan.template)
        with self._lock:
            zygote = self._live_zygote()
            found = self._of_view.get(view) if plan.shared else None
        if found is not None:
            return found
        template = zygote.template(plan)
        if plan.shared:
            with self._lock:
                known = self._of_view.setdefault(view, template)
            if known is not template:  # another thread built one at the same time
                template.close()
                return known
        return template

    def grown(self, plan: LinuxPlan) -> Template:
        """Return a template that was made after its zygote had loaded everything, because spares are to be fast."""
        template = self.get(plan)
        if not template.young:
            return template
        grown = template.zygote.template(plan)
        try:
            grown.wait_built()
        except BaseException:
            grown.close()
            raise
        with self._lock:
            known = self._of_view.get(id(plan.template))
            if known is template:
                self._of_view[id(plan.template)] = known = grown
                self._outgrown.append(template)
        if known is not grown:  # closed meanwhile, or another thread was first
            grown.close()
            return self.get(plan)
        return grown

    def close_outgrown(self, used: Iterable[Template]) -> None:
        """Close the replaced templates that are not in `used`."""
        with self._lock:
            unused = [template for template in self._outgrown if template not in used]
            self._outgrown = [template for template in self._outgrown if template not in unused]
        for template in unused:
            template.close()

    @property
    def has_outgrown(self) -> bool:
        """Whether some replaced template is still open."""
        return bool(self._outgrown)

    def drop(self, plan: LinuxPlan, template: Template) -> None:
        """Close a template, and stop using it unless another thread has replaced the template."""
        with self._lock:
            if self._of_view.get(id(plan.template)) is template:
                del self._of_view[id(plan.template)]
        template.close()

    def release(self, view: tuple[object, ...]) -> None:
        """Close the template of a view, the tuple that is its plans' `template`."""
        with self._lock:
            template = self._of_view.pop(id(view), None)
        if template is not None:
            template.close()

    def close(self) -> None:
        for template in self._all():
            template.close()
        if self._zygote is not None:
            self._zygote.close()

    def disown_descriptors(self) -> Zygote | None:
        """Drop every descriptor and return the zygote, whose end the caller of this method waits for."""
        for template in self._all():
            template.disown_descriptors()
        return self._zygote

    def after_fork(self) -> None:
        """Close this copy of every descriptor in a forked child of the library."""
        for template in self._all():
            template.after_fork()
        if self._zygote is not None:
            self._zygote.after_fork()

    def _all(self) -> tuple[Template, ...]:
        return (*self._of_view.values(), *self._outgrown)

    def _live_zygote(self) -> Zygote:
        if self._zygote is None or not self._zygote.alive:
            if self._zygote is not None:
                self._zygote.close()
                for template in self._of_view.values():
                    template.close()
                self._of_view.clear()
            self._zygote = Zygote(self._interpreter, self._preload, self._tree)
        return self._zygote


class SpareShelf:
    """The spares of a plan. The wanted number grows with the number of sandboxes needed at once."""

    def __init__(self, plan: LinuxPlan) -> None:
        self.plan = plan
        self.spares: list[ProcessBox] = []
        self.wanted = 1
        self.refill_after_s = _FIRST_REFILL_S
        self.used_at = time.monotonic()


class Pool:
    """The sandboxes of one library process and interpreter. Safe from several threads."""

    def __init__(self, interpreter: Interpreter, preload: tuple[str, ...]) -> None:
        self.tree: Tree | None = find_or_delegable()
        self.hits = self.misses = 0
        self._python = {"sys_path": interpreter.sys_path, "executable": interpreter.command}
        self._lock = _thread.allocate_lock()
        self._templates = Templates(interpreter, preload, self.tree)
        self._shelves: dict[int, SpareShelf] = {}
        self._work: _queue.SimpleQueue[ProcessBox | SpareShelf | None] = _queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._count = 0
        self._is_first = True
        self._ahead: tuple[LinuxPlan, Group] | None = None
        self._asked: tuple[LinuxPlan, Template, ProcessBox] | None = None
        self._boxes: set[ProcessBox] = set()  # given out, kept or being removed; a fork of the caller forgets them

    def take(self, plan: LinuxPlan, *, stake: int = -1) -> ProcessBox:
        """Return a sandbox that follows `plan` and has run nothing. Raises what `ProcessBox.wait_ready` raises.

        `stake`: a descriptor that the sandbox's monitor keeps until nothing of the sandbox is left.
        """
        deadline = time.monotonic() + START_S
        kept = plan.shared and plan.disk is None and not zygote_start.is_command()  # a disk is made for one sandbox
        shelf, box = self._from_shelf(plan) if kept else (None, None)
        if box is not None:
            try:
                self._refill_soon(shelf)
                box.wait_ready(deadline)
                return box
            except BaseException as error:
                box.close()
                if not _may_pass(error):  # else the spare's template died while it waited
                    raise
        self._make_group_ahead(plan)
        asked, self._asked = self._asked, None
        for attempt in (1, 2, 3):  # a lost template is often met by several threads at once
            box = template = None
            try:
                if attempt == 1 and asked is not None and asked[0] is plan:
                    _, template, box = asked
                else:
                    template = self._templates.get(plan)
                    box = self._start(plan, template, stake=stake)
                if shelf is not None and self._thread is None:
                    self._start_thread()  # while the sandbox is built
                template.wait_built()
                box.wait_ready(deadline)
                self._refill_soon(shelf)  # not earlier: a spare built at the same time would slow this sandbox
                return box
            except BaseException as error:
                if box is not None:
                    box.close()
                if template is not None:
                    self._templates.drop(plan, template)
                if attempt == 3 or not _may_pass(error):
                    raise
        raise AssertionError("unreachable")

    def ask(self, plan: LinuxPlan) -> None:
        """Begin the only sandbox of a command. `take` then returns it."""
        template = self._templates.get(plan)
        self._asked = (plan, template, self._start(plan, template))

    def _from_shelf(self, plan: LinuxPlan) -> tuple[SpareShelf, ProcessBox | None]:
        with self._lock:
            shelf, gone = self._shelf(plan)
            shelf.used_at = time.monotonic()
            box = shelf.spares[0] if shelf.spares else None
            if box is not None and box.ready_now:
                self.hits += 1
            else:
                self.misses += 1
                shelf.wanted = min(_MOST_SPARES, shelf.wanted + 1) if shelf.wanted else 0
            del shelf.spares[:1]  # last: an interrupt before this line leaves the spare on the shelf
        for spare in gone:
            spare.close()
        return shelf, box

    def _refill_soon(self, shelf: SpareShelf | None) -> None:
        if shelf is not None and shelf.wanted:
            self._do(shelf)

    def _start(self, plan: LinuxPlan, template: Template, *, waits: bool = False, stake: int = -1) -> ProcessBox:
        """Begin a sandbox. `waits`: it is a spare, for which no caller waits."""
        with self._lock:
            self._count += 1
            number = self._count
        box_id = f"{number}-{os.urandom(3).hex()}"
        group = self._group(plan, box_id)
        uid = None
        disk = -1
        ours, theirs = fast_stdlib.pair(fast_stdlib.SOCK_STREAM)
        fast_stdlib.widen(ours, theirs)
        outlet = fast_stdlib.pair(fast_stdlib.SOCK_SEQPACKET) if plan.outlets is not None else None
        try:
            uid = uids.hold() if plan.as_root else None
            python = self._python_of(plan)
            box = ProcessBox(plan, ours, python, group=group, uid=uid, retire=self._do, origin=(template, number))
            sockets = [("channel", theirs.fileno())]
            if stake >= 0:
                sockets.append(("stake", stake))
            if outlet is not None:
                box.outlet_channel = outlet[0]
                sockets.append(("listeners", outlet[1].fileno()))
            if isinstance(plan.disk, tuple):
                assert uid is not None
                disk = _make_disk(*plan.disk, uid.uid)
                sockets.append(("disk", disk))
            self._send(template, plan, number, sockets, group, uid, waits=waits)
        except BaseException:
            ours.close()
            if outlet is not None:
                outlet[0].close()
            if group is not None:
                group.remove()
            if uid is not None:
                uid.release()
            if not plan.shared:
                template.close()
            raise
        finally:
            theirs.close()
            if disk >= 0:
                os.close(disk)
            if outlet is not None:
                outlet[1].close()
        self._boxes.add(box)
        box.on_destroyed.append(lambda: self._let_go(box))
        return box

    def _python_of(self, plan: LinuxPlan) -> dict[str, object]:
        if plan.foreign:
            return {"sys_path": None, "executable": plan.python, "fresh": True}
        return {**self._python, "fresh": plan.fresh}

    def release(self, view: tuple[object, ...]) -> bool:
        """Drop template and spares of a view, the `template` of some plans. Returns False while a sandbox uses it."""
        with self._lock:
            shelves = [shelf for shelf in self._shelves.values() if shelf.plan.template is view]
            spares = [spare for shelf in shelves for spare in shelf.spares]
            if any(box.plan.template is view and box not in spares for box in self._boxes):
                return False
            for shelf in shelves:
                shelf.spares, shelf.wanted = [], 0
                del self._shelves[id(shelf.plan)]
        for spare in spares:
            spare.close()
        for spare in spares:
            spare.wait_destroyed(START_S)
        self._templates.release(view)
        return True

    def _send(
        self,
        template: Template,
        plan: LinuxPlan,
        number: int,
        sockets: list[tuple[str, int]],
        group: Group | None,
        uid: HeldUid | None,
        *,
        waits: bool,
    ) -> None:
        """Ask the template for the sandbox, with what differs between sandboxes of a plan: uid, CPUs, cgroup."""
        named: list[tuple[str, int | None]] = [*sockets]
        opened: list[int | None] = []
        try:
            if group is not None:
                opened.append(group.cpu_fd())
                opened.append(group.freezer_fd())
                opened.append(group.into_fd())
                opened += group.join_fds()
                named += [*zip(("cpu", "freezer", "into"), opened, strict=False), *(("join", fd) for fd in opened[3:])]
            if uid is not None:
                named.append(("uid", uid.fileno()))
            there = [(name, fd) for name, fd in named if fd is not None]
            request = {
                "box": number,
                "owner": 1000 if uid is None else uid.uid,
                "affinity": _choose_cpus(plan.cpus),
                "waits": waits,
                "fds": [name for name, _ in there],
            }
            template.launch(plan, request, [fd for _, fd in there])
        finally:
            for fd in opened:
                if fd is not None:
                    os.close(fd)

    def _group(self, plan: LinuxPlan, box_id: str) -> Group | None:
        if not plan.cgroup:
            return None
        if self.tree is None:
            if plan.counts_on_cgroup:
                message = "the plan counts on a cgroup, and there was none when this process began its sandboxes"
                raise SandboxError(message, code="cgroup", fix="try again", retryable=True)
            return None
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is plan:
            return ahead[1]
        if ahead is not None:
            ahead[1].remove()
        return self._new_group(plan, box_id)

    def _new_group(self, plan: LinuxPlan, box_id: str) -> Group:
        assert self.tree is not None
        processes = min(plan.processes + OURS + RESERVE, _MOST_PROCESSES)
        try:
            return self.tree.create(box_id, GroupLimits(plan.memory_bytes, processes, plan.cpus))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # too many open files: no fault of the cgroups
                raise
            from ringfence.host.kernel_refusals import is_lasting

            message = f"no cgroup could be made for the sandbox: {error}"
            if is_lasting(error.errno):
                raise UnsupportedError(message, code="cgroup", fix="ringfence doctor") from None
            full = error.errno in (errno.EAGAIN, errno.ENOSPC)
            fix = "close sandboxes, or raise cgroup.max.descendants above them" if full else "try again"
            raise SandboxError(message, code="cgroup", fix=fix, retryable=True) from None

    def _make_group_ahead(self, plan: LinuxPlan) -> None:
        """Make the first sandbox's cgroup while the zygote still starts, on cgroup v1, where it is five folders."""
        with self._lock:
            first, self._is_first = self._is_first, False
        if first and plan.cgroup and self.tree is not None and self.tree.kind == "cgroup v1":
            self._ahead = (plan, self._new_group(plan, f"0-{os.urandom(3).hex()}"))

    def _let_go(self, box: ProcessBox) -> None:
        self._boxes.discard(box)
        self._close_outgrown()

    def _close_outgrown(self) -> None:
        if self._templates.has_outgrown:
            self._templates.close_outgrown({box.template for box in list(self._boxes)})

    def _shelf(self, plan: LinuxPlan) -> tuple[SpareShelf, list[ProcessBox]]:
        """Return the plan's shelf, and the spares of a shelf that was dropped for it. The caller holds the lock."""
        shelf = self._shelves.get(id(plan))
        if shelf is not None:
            shelf.wanted = max(1, shelf.wanted)
            return shelf, []
        shelf = self._shelves[id(plan)] = SpareShelf(plan)
        shelf.wanted = int(len(self._shelves) == 1)  # the first policy; of others a spare pays from the second run on
        if len(self._shelves) <= _SHELVES:
            return shelf, []
        oldest = min(self._shelves, key=lambda key: self._shelves[key].used_at)
        return shelf, self._shelves.pop(oldest).spares

    # the thread that builds spares and removes what has ended

    def _do(self, work: ProcessBox | SpareShelf) -> None:
        """Have the thread refill a shelf, or destroy a sandbox."""
        if self._thread is None:  # read without the lock, which is held while a zygote starts: an event loop may call
            self._start_thread()
        if self._closed:
            if isinstance(work, ProcessBox):
                work.destroy()
            return
        self._work.put(work)

    def _start_thread(self) -> None:
        import threading  # 5 ms, which a command never needs

        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._keep_house, name="ringfence", daemon=True)
                self._thread.start()

    def _keep_house(self) -> None:
        due: dict[int, tuple[float, SpareShelf]] = {}  # refills, each a moment after the run that made it necessary
        while True:
            wait = min((at for at, _ in due.values()), default=time.monotonic() + _SPARE_IDLE_S / 4) - time.monotonic()
            try:
                work = self._work.get(timeout=max(0.0, wait))
            except _queue.Empty:
                if not due:
                    self._drop_idle_spares()
            else:
                if work is None:
                    return
                if isinstance(work, ProcessBox):
                    self._destroy(work)
                else:
                    # The run that took the spare gets the CPU first.
                    due.setdefault(id(work), (time.monotonic() + work.refill_after_s, work))
            for key, (at, shelf) in list(due.items()):
                if time.monotonic() >= at:
                    del due[key]
                    self._refill(shelf)

    def _destroy(self, box: ProcessBox) -> None:
        try:
            box.destroy()
        except OSError:
            return  # the caller closed a descriptor of ours; the sweep removes what is left

    def _refill(self, shelf: SpareShelf) -> None:
        shelf.refill_after_s = _REFILL_AFTER_S
        while self._is_kept(shelf) and len(shelf.spares) < shelf.wanted:
            try:
                spare = self._start(shelf.plan, self._templates.grown(shelf.plan), waits=True)
            except (RingfenceError, OSError):
                return  # the next take() meets the same failure and raises it
            self._close_outgrown()
            if not self._shelve(shelf, spare):
                spare.close()

    def _shelve(self, shelf: SpareShelf, spare: ProcessBox) -> bool:
        with self._lock:
            is_kept = self._is_kept(shelf)
            if is_kept:
                shelf.spares.append(spare)
            return is_kept

    def _is_kept(self, shelf: SpareShelf) -> bool:
        """Return whether spares of this shelf are used: it may have been dropped since its refill was asked for."""
        return not self._closed and self._shelves.get(id(shelf.plan)) is shelf

    def _drop_idle_spares(self) -> None:
        limit = time.monotonic() - _SPARE_IDLE_S
        with self._lock:
            idle = [s for shelf in self._shelves.values() if shelf.used_at < limit for s in shelf.spares]
            for shelf in self._shelves.values():
                if shelf.used_at < limit:
                    shelf.spares, shelf.wanted = [], 1
        for spare in idle:
            spare.close()

    def close(self) -> None:
        """End the zygote and every sandbox, and wait until all are gone."""
        with self._lock:
            self._shelves.clear()
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._work.put(None)
            thread.join(10)
        for box in list(self._boxes):  # spares, and sandboxes that their callers did not close
            box.close()
        while not self._work.empty():
            work = self._work.get_nowait()
            if isinstance(work, ProcessBox):
                work.destroy()
        self._templates.close()
        if self.tree is not None:
            self.tree.close()

    def disown_descriptors(self) -> None:
        """Drop every descriptor, because the caller closed them. The processes of the pool end by themselves.

        A thread removes their cgroups.
        """
        self._closed = True
        self._work.put(None)
        boxes, zygote = list(self._boxes), self._templates.disown_descriptors()
        for box in boxes:
            box.disown_descriptors()

        def remove() -> None:
            if zygote is not None:
                zygote.disown_descriptors()
            for box in boxes:
                box.remove_group()

        _thread.start_new_thread(remove, ())

    def after_fork(self) -> None:
        """Close this copy of every descriptor in a forked child: the parent goes on with the sandboxes."""
        self._templates.after_fork()
        for box in self._boxes:
            box.after_fork()


def _may_pass(error: BaseException) -> bool:
    """Return whether another attempt may succeed. No guest code has run. An attempt that timed out is the last."""
    return isinstance(error, SandboxError) and error.retryable and not isinstance(error, StartTimeoutError)


def _make_disk(size: int, files: int, owner: int) -> int:
    from ringfence.host.loop_disk import make_image

    return make_image(size, files, owner)


def _choose_cpus(cpus: float) -> list[int]:
    """Return as many CPUs as the policy permits: libraries start a thread for each CPU they see."""
    available = sorted(os.sched_getaffinity(0))
    count = min(max(1, -int(-cpus // 1)), len(available))
    start = os.urandom(1)[0]
    return [available[(start + i) % len(available)] for i in range(count)]


# Zygotes and spares belong to the process, like its heap: two sandboxes of one program share them.
_pools: dict[tuple[str, tuple[str, ...]], Pool] = {}
_pools_lock = _thread.allocate_lock()


def pool(interpreter: Interpreter, preload: tuple[str, ...]) -> Pool:
    """Return this process's pool for an interpreter with preloaded modules; make a pool where there is none."""
    key = (interpreter.executable, preload)
    with _pools_lock:
        if _sentinel.was_closed():
            for each in _pools.values():
                each.disown_descriptors()
            _pools.clear()
            _sentinel.disown_descriptors()
        found = _pools.get(key)
        if found is None:
            if not _pools:
                _prepare_process()
            _sentinel.open()  # under the lock: another thread would take a half-opened sentinel for a closed one
            found = _pools[key] = Pool(interpreter, preload)
        return found


def tree_of_sandboxes() -> Tree | None:
    """Return the cgroups of this process's sandboxes; before the first pool, those that this process could use now.

    A pool keeps what it found: cgroups that appear later limit none of its sandboxes.
    """
    for each in _pools.values():
        return each.tree
    return find_or_delegable()


def release(view: tuple[object, ...]) -> bool:
    """Drop everything kept for a view, as `Pool.release` does. Returns False while a sandbox uses the view."""
    return all(each.release(view) for each in _pools.values())


def close_all() -> None:
    """End every pool of this process."""
    with _pools_lock:
        pools = list(_pools.values())
        _pools.clear()
        _sentinel.close()
    for each in pools:
        each.close()


def _prepare_process() -> None:
    from ringfence.host import state

    state.sweep()
    lifecycle.at_exit(lifecycle.SANDBOXES, close_all)
    lifecycle.after_fork(_forget_all)


def _forget_all() -> None:
    global _pools_lock
    _pools_lock = _thread.allocate_lock()
    for each in _pools.values():
        each.after_fork()
    _pools.clear()
